//! The ABI of `libibverbs.so.1`: the structs and numbers of `<infiniband/verbs.h>` that are used
//! here.
//!
//! A leaf without code. Field names are those of the header. [`STRUCTS`], [`HEADS`] and [`NUMBERS`]
//! hold the same facts as data. A test compares them with a C compiler's values, if the headers are
//! installed.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// The memory layout of a struct.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StructLayout {
    /// Its name in C, with its keyword.
    pub name: &'static str,
    /// Bytes.
    pub size: usize,
    /// Fields by their paths in C, and their offsets.
    pub fields: &'static [(&'static str, usize)],
}

macro_rules! path {
    ($field:ident) => {
        stringify!($field)
    };
    ($field:ident $path:literal) => {
        $path
    };
}

macro_rules! structs {
    ($(#[$list_doc:meta])* $list:ident; $($(#[$doc:meta])* $name:ident = $c:literal {
        $($(#[$field_doc:meta])* $field:ident: $type:ty $(as $path:literal)?,)*
    })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy)]
            #[repr(C)]
            pub struct $name {
                $($(#[$field_doc])* pub $field: $type,)*
            }
        )*

        $(#[$list_doc])*
        pub const $list: &[StructLayout] = &[$(
            StructLayout {
                name: $c,
                size: size_of::<$name>(),
                fields: &[$((path!($field $($path)?), std::mem::offset_of!($name, $field)),)*],
            },
        )*];
    };
}

structs! {
    /// Structs that are bound completely.
    STRUCTS;

    #[repr(align(8))]
    /// An address on a fabric. For RoCE v2 over IPv4, the last four bytes are the address, and the
    /// two bytes before are ff.
    Gid = "union ibv_gid" {
        /// In network order.
        raw: [u8; 16],
    }

    /// Limits of a device.
    DeviceAttr = "struct ibv_device_attr" {
        /// Firmware version; ends with 0.
        fw_ver: [c_char; 64],
        /// In network order.
        node_guid: u64,
        /// In network order.
        sys_image_guid: u64,
        /// Maximum bytes of a region.
        max_mr_size: u64,
        /// Bits of supported page sizes.
        page_size_cap: u64,
        /// Id of the vendor.
        vendor_id: u32,
        /// Id of the part.
        vendor_part_id: u32,
        /// Version of the hardware.
        hw_ver: u32,
        /// Maximum queue pairs.
        max_qp: c_int,
        /// Maximum work requests of a queue.
        max_qp_wr: c_int,
        /// `IBV_DEVICE_*`.
        device_cap_flags: c_uint,
        /// Maximum local pieces of a work request.
        max_sge: c_int,
        /// Maximum local pieces of a READ.
        max_sge_rd: c_int,
        /// Maximum completion queues.
        max_cq: c_int,
        /// Maximum entries of a completion queue.
        max_cqe: c_int,
        /// Maximum regions.
        max_mr: c_int,
        /// Maximum protection domains.
        max_pd: c_int,
        /// Maximum READs and atomics in progress.
        max_qp_rd_atom: c_int,
        /// This number and the next 18 are not used here.
        max_ee_rd_atom: [c_int; 19],
        /// Maximum partition keys.
        max_pkeys: u16,
        /// Delay of the device's own acknowledgements.
        local_ca_ack_delay: u8,
        /// Ports, numbered from 1.
        phys_port_cnt: u8,
    }

    /// State of a port.
    PortAttr = "struct ibv_port_attr" {
        /// `IBV_PORT_*`.
        state: c_uint,
        /// `IBV_MTU_*`.
        max_mtu: c_uint,
        /// `IBV_MTU_*`.
        active_mtu: c_uint,
        /// Entries of the GID table.
        gid_tbl_len: c_int,
        /// Capabilities.
        port_cap_flags: u32,
        /// Maximum bytes of a message.
        max_msg_sz: u32,
        /// Errors.
        bad_pkey_cntr: u32,
        /// Errors.
        qkey_viol_cntr: u32,
        /// Entries of the partition key table.
        pkey_tbl_len: u16,
        /// Local address on InfiniBand.
        lid: u16,
        /// LID of the subnet manager.
        sm_lid: u16,
        /// Bits of `lid` that are masked.
        lmc: u8,
        /// Virtual lanes.
        max_vl_num: u8,
        /// Service level of the subnet manager.
        sm_sl: u8,
        /// Timeout of the subnet.
        subnet_timeout: u8,
        /// Reply of the subnet manager.
        init_type_reply: u8,
        /// Lanes of the link, as a bit.
        active_width: u8,
        /// Rate of a lane, as a bit.
        active_speed: u8,
        /// Physical state.
        phys_state: u8,
        /// `IBV_LINK_LAYER_*`.
        link_layer: u8,
        /// Flags.
        flags: u8,
        /// More capabilities.
        port_cap_flags2: u16,
    }

    /// An entry of a port's GID table.
    GidEntry = "struct ibv_gid_entry" {
        /// The address.
        gid: Gid,
        /// Its index in the table.
        gid_index: u32,
        /// The port's number.
        port_num: u32,
        /// `IBV_GID_TYPE_*`.
        gid_type: u32,
        /// Index of the network device; 0 if there is none.
        ndev_ifindex: u32,
    }

    /// The route of packets on the fabric.
    GlobalRoute = "struct ibv_global_route" {
        /// The remote GID.
        dgid: Gid,
        /// 0: no label.
        flow_label: u32,
        /// The local index in the port's GID table.
        sgid_index: u8,
        /// Maximum routers on the path.
        hop_limit: u8,
        /// For RoCE v2, the byte of DSCP and ECN.
        traffic_class: u8,
    }

    /// The path to another port.
    AhAttr = "struct ibv_ah_attr" {
        /// Valid if `is_global` is set.
        grh: GlobalRoute,
        /// For InfiniBand.
        dlid: u16,
        /// For InfiniBand.
        sl: u8,
        /// For InfiniBand.
        src_path_bits: u8,
        /// 0: the rate of the link.
        static_rate: u8,
        /// Whether `grh` is valid; always with RoCE.
        is_global: u8,
        /// The local port.
        port_num: u8,
    }

    /// The capacity of a queue pair.
    QpCap = "struct ibv_qp_cap" {
        /// Work requests.
        max_send_wr: u32,
        /// Receives.
        max_recv_wr: u32,
        /// Pieces of a work request.
        max_send_sge: u32,
        /// Pieces of a receive.
        max_recv_sge: u32,
        /// Inline bytes of a work request.
        max_inline_data: u32,
    }

    /// How a queue pair is created.
    QpInitAttr = "struct ibv_qp_init_attr" {
        /// For the creator's use.
        qp_context: *mut c_void,
        /// Completion queue for work requests.
        send_cq: *mut Cq,
        /// Completion queue for receives.
        recv_cq: *mut Cq,
        /// Null: the queue pair has its own receives.
        srq: *mut c_void,
        /// The requested capacity, then the granted one.
        cap: QpCap,
        /// `IBV_QPT_*`.
        qp_type: c_uint,
        /// 0: each work request says whether it is signalled.
        sq_sig_all: c_int,
    }

    /// Attributes of a queue pair; a mask selects the ones to set.
    QpAttr = "struct ibv_qp_attr" {
        /// `IBV_QPS_*`.
        qp_state: c_uint,
        /// `IBV_QPS_*`.
        cur_qp_state: c_uint,
        /// `IBV_MTU_*`.
        path_mtu: c_uint,
        /// `IBV_MIG_*`.
        path_mig_state: c_uint,
        /// For datagrams.
        qkey: u32,
        /// Sequence number of the first incoming packet.
        rq_psn: u32,
        /// Sequence number of the first outgoing packet.
        sq_psn: u32,
        /// Number of the remote queue pair.
        dest_qp_num: u32,
        /// `IBV_ACCESS_*`.
        qp_access_flags: c_uint,
        /// For a resize.
        cap: QpCap,
        /// The path.
        ah_attr: AhAttr,
        /// The alternative path.
        alt_ah_attr: AhAttr,
        /// Index in the partition key table.
        pkey_index: u16,
        /// Partition key index of the alternative path.
        alt_pkey_index: u16,
        /// For draining.
        en_sqd_async_notify: u8,
        /// For draining.
        sq_draining: u8,
        /// Outgoing READs and atomics in progress.
        max_rd_atomic: u8,
        /// Incoming READs and atomics in progress.
        max_dest_rd_atomic: u8,
        /// Code of the requested pause if no receive is posted.
        min_rnr_timer: u8,
        /// The local port.
        port_num: u8,
        /// Time until a packet is retransmitted: 4.096 µs · 2^n.
        timeout: u8,
        /// Number of retransmissions.
        retry_cnt: u8,
        /// Number of retries if the receiver was not ready; 7: unlimited.
        rnr_retry: u8,
        /// Port of the alternative path.
        alt_port_num: u8,
        /// Timeout of the alternative path.
        alt_timeout: u8,
        /// For raw packets.
        rate_limit: u32,
    }

    /// A piece of local memory.
    Sge = "struct ibv_sge" {
        /// Address in this process.
        addr: u64,
        /// Bytes.
        length: u32,
        /// Local key of the registration.
        lkey: u32,
    }

    /// A work request, linked to the next one.
    SendWr = "struct ibv_send_wr" {
        /// Id that is returned with the completion.
        wr_id: u64,
        /// Null: the end of the chain.
        next: *mut SendWr,
        /// Its pieces.
        sg_list: *mut Sge,
        /// Number of pieces.
        num_sge: c_int,
        /// `IBV_WR_*`.
        opcode: c_uint,
        /// `IBV_SEND_*`.
        send_flags: c_uint,
        /// In network order.
        imm_data: u32,
        /// Address in the peer's process.
        remote_addr: u64 as "wr.rdma.remote_addr",
        /// Key of the peer's registration.
        rkey: u32 as "wr.rdma.rkey",
        /// For atomics; this and all later fields are not used here.
        swap: [u64; 2] as "wr.atomic.swap",
        /// For XRC.
        remote_srqn: u32 as "qp_type.xrc.remote_srqn",
        /// For memory windows and segmentation.
        mw: [u64; 6] as "bind_mw.mw",
    }

    /// A receive, linked to the next one.
    RecvWr = "struct ibv_recv_wr" {
        /// Id that is returned with the completion.
        wr_id: u64,
        /// Null: the end of the chain.
        next: *mut RecvWr,
        /// Its pieces.
        sg_list: *mut Sge,
        /// Number of pieces. An immediate needs none.
        num_sge: c_int,
    }

    /// A completion. After a failure, only `wr_id`, `status`, `vendor_err` and `qp_num` are valid.
    Wc = "struct ibv_wc" {
        /// Id of the work request or receive.
        wr_id: u64,
        /// `IBV_WC_*`.
        status: c_uint,
        /// `IBV_WC_*`.
        opcode: c_uint,
        /// The vendor's own code.
        vendor_err: u32,
        /// Received bytes.
        byte_len: u32,
        /// In network order; valid if `wc_flags` say so.
        imm_data: u32,
        /// The local queue pair's number.
        qp_num: u32,
        /// For datagrams.
        src_qp: u32,
        /// `IBV_WC_*`.
        wc_flags: c_uint,
        /// For datagrams.
        pkey_index: u16,
        /// For datagrams.
        slid: u16,
        /// For datagrams.
        sl: u8,
        /// For datagrams.
        dlid_path_bits: u8,
    }

    /// The functions of a device.
    ContextOps = "struct ibv_context_ops" {
        /// This function and the next ten are not used here.
        _compat_query_device: [*mut c_void; 11],
        /// Takes completions.
        poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
        /// Requests an event for the next completion.
        req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
        /// This function and the next eleven are not used here.
        _compat_cq_event: [*mut c_void; 12],
        /// Posts a chain of work requests.
        post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
        /// Posts a chain of receives.
        post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
        /// This function and the next four are not used here.
        _compat_create_ah: [*mut c_void; 5],
    }
}

structs! {
    /// Structs that the library creates. Only their first fields are bound.
    HEADS;

    /// An open device.
    Context = "struct ibv_context" {
        /// The entry in the device list.
        device: *mut ListedDevice,
        /// The functions of the device.
        ops: ContextOps,
        /// Descriptor for commands to the kernel.
        cmd_fd: c_int,
        /// Descriptor for events of the device.
        async_fd: c_int,
        /// Interrupt vectors for completions.
        num_comp_vectors: c_int,
    }

    /// A protection domain.
    Pd = "struct ibv_pd" {
        /// Its device.
        context: *mut Context,
        /// The kernel's handle.
        handle: u32,
    }

    /// Registered memory.
    Mr = "struct ibv_mr" {
        /// Its device.
        context: *mut Context,
        /// Its protection domain.
        pd: *mut Pd,
        /// First byte.
        addr: *mut c_void,
        /// Bytes.
        length: usize,
        /// The kernel's handle.
        handle: u32,
        /// Key for local pieces.
        lkey: u32,
        /// Key for peers.
        rkey: u32,
    }

    /// The channel of completion queue events.
    CompChannel = "struct ibv_comp_channel" {
        /// Its device.
        context: *mut Context,
        /// Readable when there is an event.
        fd: c_int,
        /// Number of queues that use it.
        refcnt: c_int,
    }

    /// A completion queue.
    Cq = "struct ibv_cq" {
        /// Its device.
        context: *mut Context,
        /// Null: no events.
        channel: *mut CompChannel,
        /// For the creator's use.
        cq_context: *mut c_void,
        /// The kernel's handle.
        handle: u32,
        /// Entries.
        cqe: c_int,
    }

    /// A queue pair.
    Qp = "struct ibv_qp" {
        /// Its device.
        context: *mut Context,
        /// For the creator's use.
        qp_context: *mut c_void,
        /// Its protection domain.
        pd: *mut Pd,
        /// Completion queue for work requests.
        send_cq: *mut Cq,
        /// Completion queue for receives.
        recv_cq: *mut Cq,
        /// Null: the queue pair has its own receives.
        srq: *mut c_void,
        /// The kernel's handle.
        handle: u32,
        /// Number on the fabric.
        qp_num: u32,
    }
}

/// A device in the library's list; opaque.
#[repr(C)]
pub struct ListedDevice {
    private: [u8; 0],
}

macro_rules! numbers {
    ($($(#[$doc:meta])* $name:ident = $c:ident: $value:literal;)*) => {
        $($(#[$doc])* pub const $name: c_uint = $value;)*

        /// All numbers by their names in C.
        pub const NUMBERS: &[(&str, c_uint)] = &[$((stringify!($c), $value),)*];
    };
}

numbers! {
    /// A port that carries traffic.
    PORT_ACTIVE = IBV_PORT_ACTIVE: 4;
    /// The subnet manager assigns addresses.
    LINK_LAYER_INFINIBAND = IBV_LINK_LAYER_INFINIBAND: 1;
    /// GIDs are the addresses.
    LINK_LAYER_ETHERNET = IBV_LINK_LAYER_ETHERNET: 2;
    /// 256 bytes. Each next value doubles the size.
    MTU_256 = IBV_MTU_256: 1;
    /// 4,096 bytes.
    MTU_4096 = IBV_MTU_4096: 5;
    /// A GID on InfiniBand.
    GID_TYPE_IB = IBV_GID_TYPE_IB: 0;
    /// RoCE on Ethernet, not routable.
    GID_TYPE_ROCE_V1 = IBV_GID_TYPE_ROCE_V1: 1;
    /// RoCE in UDP, routable.
    GID_TYPE_ROCE_V2 = IBV_GID_TYPE_ROCE_V2: 2;

    /// Writes of peers and receives are allowed.
    ACCESS_LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE: 1;
    /// Peers can WRITE; needs local write access.
    ACCESS_REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE: 2;
    /// Writes can overtake each other on their way to memory. Devices without support ignore it.
    ACCESS_RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING: 0x10_0000;

    /// Reliable connection.
    QPT_RC = IBV_QPT_RC: 2;
    /// New, or reset.
    QPS_RESET = IBV_QPS_RESET: 0;
    /// Receives can be posted.
    QPS_INIT = IBV_QPS_INIT: 1;
    /// Receives packets.
    QPS_RTR = IBV_QPS_RTR: 2;
    /// Receives and sends packets.
    QPS_RTS = IBV_QPS_RTS: 3;
    /// Everything posted is flushed.
    QPS_ERR = IBV_QPS_ERR: 6;

    /// Mask bit of [`QpAttr`], like the next ones: `qp_state` is set.
    QP_STATE = IBV_QP_STATE: 0x1;
    /// `qp_access_flags`.
    QP_ACCESS_FLAGS = IBV_QP_ACCESS_FLAGS: 0x8;
    /// `pkey_index`.
    QP_PKEY_INDEX = IBV_QP_PKEY_INDEX: 0x10;
    /// `port_num`.
    QP_PORT = IBV_QP_PORT: 0x20;
    /// `ah_attr`.
    QP_AV = IBV_QP_AV: 0x80;
    /// `path_mtu`.
    QP_PATH_MTU = IBV_QP_PATH_MTU: 0x100;
    /// `timeout`.
    QP_TIMEOUT = IBV_QP_TIMEOUT: 0x200;
    /// `retry_cnt`.
    QP_RETRY_CNT = IBV_QP_RETRY_CNT: 0x400;
    /// `rnr_retry`.
    QP_RNR_RETRY = IBV_QP_RNR_RETRY: 0x800;
    /// `rq_psn`.
    QP_RQ_PSN = IBV_QP_RQ_PSN: 0x1000;
    /// `max_rd_atomic`.
    QP_MAX_QP_RD_ATOMIC = IBV_QP_MAX_QP_RD_ATOMIC: 0x2000;
    /// `min_rnr_timer`.
    QP_MIN_RNR_TIMER = IBV_QP_MIN_RNR_TIMER: 0x8000;
    /// `sq_psn`.
    QP_SQ_PSN = IBV_QP_SQ_PSN: 0x1_0000;
    /// `max_dest_rd_atomic`.
    QP_MAX_DEST_RD_ATOMIC = IBV_QP_MAX_DEST_RD_ATOMIC: 0x2_0000;
    /// `dest_qp_num`.
    QP_DEST_QPN = IBV_QP_DEST_QPN: 0x10_0000;

    /// Writes into the peer's memory without notifying the peer.
    WR_RDMA_WRITE = IBV_WR_RDMA_WRITE: 0;
    /// The same, and a receive of the peer completes with 32 bits.
    WR_RDMA_WRITE_WITH_IMM = IBV_WR_RDMA_WRITE_WITH_IMM: 1;
    /// Requests a completion.
    SEND_SIGNALED = IBV_SEND_SIGNALED: 2;
    /// The bytes are copied at posting.
    SEND_INLINE = IBV_SEND_INLINE: 8;

    /// Success.
    WC_SUCCESS = IBV_WC_SUCCESS: 0;
    /// Local lengths are wrong.
    WC_LOC_LEN_ERR = IBV_WC_LOC_LEN_ERR: 1;
    /// The queue pair itself failed.
    WC_LOC_QP_OP_ERR = IBV_WC_LOC_QP_OP_ERR: 2;
    /// A piece lies outside its registration.
    WC_LOC_PROT_ERR = IBV_WC_LOC_PROT_ERR: 4;
    /// Not executed because the queue pair had failed.
    WC_WR_FLUSH_ERR = IBV_WC_WR_FLUSH_ERR: 5;
    /// The peer reports an invalid request.
    WC_REM_INV_REQ_ERR = IBV_WC_REM_INV_REQ_ERR: 9;
    /// Outside the peer's registration, or not permitted.
    WC_REM_ACCESS_ERR = IBV_WC_REM_ACCESS_ERR: 10;
    /// The peer could not execute it.
    WC_REM_OP_ERR = IBV_WC_REM_OP_ERR: 11;
    /// No answer after all retries.
    WC_RETRY_EXC_ERR = IBV_WC_RETRY_EXC_ERR: 12;
    /// The peer had no receive posted.
    WC_RNR_RETRY_EXC_ERR = IBV_WC_RNR_RETRY_EXC_ERR: 13;
    /// Completion of a local WRITE.
    WC_RDMA_WRITE = IBV_WC_RDMA_WRITE: 1;
    /// Completion of a receive with an immediate.
    WC_RECV_RDMA_WITH_IMM = IBV_WC_RECV_RDMA_WITH_IMM: 129;
    /// `imm_data` is valid.
    WC_WITH_IMM = IBV_WC_WITH_IMM: 2;
}
