//! What `libibverbs.so.1` and a program agree on: structs and numbers of `<infiniband/verbs.h>`, as far as
//! they are used here.
//!
//! Leaf, no code. Field names are the header's. [`STRUCTS`], [`HEADS`] and [`NUMBERS`] say the same as data, so
//! that a test can have a C compiler say it, too: what drifts apart is noticed where the headers are.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// How a struct lies in memory.
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
    /// Structs that are bound whole.
    STRUCTS;

    #[repr(align(8))]
    /// An address on a fabric; of RoCE v2 over IPv4 the last four bytes are the address, the two before ff.
    Gid = "union ibv_gid" {
        /// In network order.
        raw: [u8; 16],
    }

    /// Limits of a device.
    DeviceAttr = "struct ibv_device_attr" {
        /// Firmware, ends with 0.
        fw_ver: [c_char; 64],
        /// In network order.
        node_guid: u64,
        /// In network order.
        sys_image_guid: u64,
        /// Bytes of a region.
        max_mr_size: u64,
        /// Bits for page sizes.
        page_size_cap: u64,
        /// Of the maker.
        vendor_id: u32,
        /// Of the part.
        vendor_part_id: u32,
        /// Of the hardware.
        hw_ver: u32,
        /// Queue pairs.
        max_qp: c_int,
        /// Work requests of a queue.
        max_qp_wr: c_int,
        /// `IBV_DEVICE_*`.
        device_cap_flags: c_uint,
        /// Local pieces of a work request.
        max_sge: c_int,
        /// Of a READ.
        max_sge_rd: c_int,
        /// Completion queues.
        max_cq: c_int,
        /// Entries of one.
        max_cqe: c_int,
        /// Regions.
        max_mr: c_int,
        /// Protection domains.
        max_pd: c_int,
        /// READs and atomics under way.
        max_qp_rd_atom: c_int,
        /// This and the 18 numbers behind it are not used here.
        max_ee_rd_atom: [c_int; 19],
        /// Partition keys.
        max_pkeys: u16,
        /// Of the device's own.
        local_ca_ack_delay: u8,
        /// Ports, counted from 1.
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
        /// Entries of the table of GIDs.
        gid_tbl_len: c_int,
        /// Capabilities.
        port_cap_flags: u32,
        /// Bytes of a message.
        max_msg_sz: u32,
        /// Errors.
        bad_pkey_cntr: u32,
        /// Errors.
        qkey_viol_cntr: u32,
        /// Entries of the table of partition keys.
        pkey_tbl_len: u16,
        /// Local address on InfiniBand.
        lid: u16,
        /// Of the subnet manager.
        sm_lid: u16,
        /// Bits of `lid` that do not count.
        lmc: u8,
        /// Virtual lanes.
        max_vl_num: u8,
        /// Service level of the subnet manager.
        sm_sl: u8,
        /// Of the subnet.
        subnet_timeout: u8,
        /// Of the subnet manager.
        init_type_reply: u8,
        /// Lanes of the link, as bits.
        active_width: u8,
        /// Rate of a lane, as bits.
        active_speed: u8,
        /// Of the hardware.
        phys_state: u8,
        /// `IBV_LINK_LAYER_*`.
        link_layer: u8,
        /// Flags.
        flags: u8,
        /// More capabilities.
        port_cap_flags2: u16,
    }

    /// An entry of a port's table of GIDs.
    GidEntry = "struct ibv_gid_entry" {
        /// The address.
        gid: Gid,
        /// Its place in the table.
        gid_index: u32,
        /// Of which port.
        port_num: u32,
        /// `IBV_GID_TYPE_*`.
        gid_type: u32,
        /// Of the network device, 0 where there is none.
        ndev_ifindex: u32,
    }

    /// Where packets go on the fabric.
    GlobalRoute = "struct ibv_global_route" {
        /// The other end.
        dgid: Gid,
        /// 0: none.
        flow_label: u32,
        /// Our entry in the port's table of GIDs.
        sgid_index: u8,
        /// Routers on the way.
        hop_limit: u8,
        /// Of RoCE v2 the byte of DSCP and ECN.
        traffic_class: u8,
    }

    /// The way to another port.
    AhAttr = "struct ibv_ah_attr" {
        /// Where `is_global`.
        grh: GlobalRoute,
        /// On InfiniBand.
        dlid: u16,
        /// On InfiniBand.
        sl: u8,
        /// On InfiniBand.
        src_path_bits: u8,
        /// 0: the link's own.
        static_rate: u8,
        /// Whether there is a `grh`; always with RoCE.
        is_global: u8,
        /// Ours.
        port_num: u8,
    }

    /// What a queue pair has room for.
    QpCap = "struct ibv_qp_cap" {
        /// Work requests.
        max_send_wr: u32,
        /// Receives.
        max_recv_wr: u32,
        /// Pieces of a work request.
        max_send_sge: u32,
        /// Pieces of a receive.
        max_recv_sge: u32,
        /// Bytes that go with the work request itself.
        max_inline_data: u32,
    }

    /// How a queue pair is made.
    QpInitAttr = "struct ibv_qp_init_attr" {
        /// The maker's.
        qp_context: *mut c_void,
        /// For work requests.
        send_cq: *mut Cq,
        /// For receives.
        recv_cq: *mut Cq,
        /// Null: receives of its own.
        srq: *mut c_void,
        /// What is asked for, then what is granted.
        cap: QpCap,
        /// `IBV_QPT_*`.
        qp_type: c_uint,
        /// 0: work requests say whether they are signalled.
        sq_sig_all: c_int,
    }

    /// What is set of a queue pair; a mask says which of these.
    QpAttr = "struct ibv_qp_attr" {
        /// `IBV_QPS_*`.
        qp_state: c_uint,
        /// `IBV_QPS_*`.
        cur_qp_state: c_uint,
        /// `IBV_MTU_*`.
        path_mtu: c_uint,
        /// `IBV_MIG_*`.
        path_mig_state: c_uint,
        /// Of datagrams.
        qkey: u32,
        /// Sequence number of the first packet to come.
        rq_psn: u32,
        /// Of the first to leave.
        sq_psn: u32,
        /// The other end's number.
        dest_qp_num: u32,
        /// `IBV_ACCESS_*`.
        qp_access_flags: c_uint,
        /// For a resize.
        cap: QpCap,
        /// The way.
        ah_attr: AhAttr,
        /// Another way.
        alt_ah_attr: AhAttr,
        /// Place in the table of partition keys.
        pkey_index: u16,
        /// Of the other way.
        alt_pkey_index: u16,
        /// Of draining.
        en_sqd_async_notify: u8,
        /// Of draining.
        sq_draining: u8,
        /// READs and atomics that leave at a time.
        max_rd_atomic: u8,
        /// That are taken in at a time.
        max_dest_rd_atomic: u8,
        /// Code of the pause asked for when no receive is there.
        min_rnr_timer: u8,
        /// Ours.
        port_num: u8,
        /// 4.096 µs · 2^n until a packet is sent again.
        timeout: u8,
        /// How often.
        retry_cnt: u8,
        /// How often where the receiver was not ready; 7: without end.
        rnr_retry: u8,
        /// Of the other way.
        alt_port_num: u8,
        /// Of the other way.
        alt_timeout: u8,
        /// Of raw packets.
        rate_limit: u32,
    }

    /// A piece of local memory.
    Sge = "struct ibv_sge" {
        /// In this process.
        addr: u64,
        /// Bytes.
        length: u32,
        /// Of its registration.
        lkey: u32,
    }

    /// A work request, linked to the next.
    SendWr = "struct ibv_send_wr" {
        /// Comes back with its completion.
        wr_id: u64,
        /// Null: the last of the chain.
        next: *mut SendWr,
        /// Its pieces.
        sg_list: *mut Sge,
        /// How many.
        num_sge: c_int,
        /// `IBV_WR_*`.
        opcode: c_uint,
        /// `IBV_SEND_*`.
        send_flags: c_uint,
        /// In network order.
        imm_data: u32,
        /// In the peer's process.
        remote_addr: u64 as "wr.rdma.remote_addr",
        /// Of the peer's registration.
        rkey: u32 as "wr.rdma.rkey",
        /// Of atomics; as all that follows, not used here.
        swap: [u64; 2] as "wr.atomic.swap",
        /// Of XRC.
        remote_srqn: u32 as "qp_type.xrc.remote_srqn",
        /// Of memory windows and segmentation.
        mw: [u64; 6] as "bind_mw.mw",
    }

    /// A receive, linked to the next.
    RecvWr = "struct ibv_recv_wr" {
        /// Comes back with its completion.
        wr_id: u64,
        /// Null: the last of the chain.
        next: *mut RecvWr,
        /// Its pieces.
        sg_list: *mut Sge,
        /// How many; none suffices for an immediate.
        num_sge: c_int,
    }

    /// A completion. Of one that is no success only `wr_id`, `status`, `vendor_err` and `qp_num` count.
    Wc = "struct ibv_wc" {
        /// Of the work request or receive.
        wr_id: u64,
        /// `IBV_WC_*`.
        status: c_uint,
        /// `IBV_WC_*`.
        opcode: c_uint,
        /// The maker's own.
        vendor_err: u32,
        /// Of what was received.
        byte_len: u32,
        /// In network order; where `wc_flags` say so.
        imm_data: u32,
        /// Ours.
        qp_num: u32,
        /// Of datagrams.
        src_qp: u32,
        /// `IBV_WC_*`.
        wc_flags: c_uint,
        /// Of datagrams.
        pkey_index: u16,
        /// Of datagrams.
        slid: u16,
        /// Of datagrams.
        sl: u8,
        /// Of datagrams.
        dlid_path_bits: u8,
    }

    /// A device's own functions.
    ContextOps = "struct ibv_context_ops" {
        /// This and the ten behind it are not used here.
        _compat_query_device: [*mut c_void; 11],
        /// Takes completions.
        poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
        /// Asks for an event with the next completion.
        req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
        /// This and the eleven behind it are not used here.
        _compat_cq_event: [*mut c_void; 12],
        /// Posts a chain of work requests.
        post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
        /// Posts a chain of receives.
        post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
        /// This and the four behind it are not used here.
        _compat_create_ah: [*mut c_void; 5],
    }
}

structs! {
    /// Structs that the library makes, of which the head is bound.
    HEADS;

    /// An open device.
    Context = "struct ibv_context" {
        /// As listed.
        device: *mut ListedDevice,
        /// Its functions.
        ops: ContextOps,
        /// Commands to the kernel.
        cmd_fd: c_int,
        /// Events of the device.
        async_fd: c_int,
        /// Interrupts that completions can use.
        num_comp_vectors: c_int,
    }

    /// A protection domain.
    Pd = "struct ibv_pd" {
        /// Its device.
        context: *mut Context,
        /// The kernel's.
        handle: u32,
    }

    /// Registered memory.
    Mr = "struct ibv_mr" {
        /// Its device.
        context: *mut Context,
        /// Its domain.
        pd: *mut Pd,
        /// First byte.
        addr: *mut c_void,
        /// Bytes.
        length: usize,
        /// The kernel's.
        handle: u32,
        /// For local pieces.
        lkey: u32,
        /// For peers.
        rkey: u32,
    }

    /// Where events of completion queues arrive.
    CompChannel = "struct ibv_comp_channel" {
        /// Its device.
        context: *mut Context,
        /// Readable when there is an event.
        fd: c_int,
        /// Queues that use it.
        refcnt: c_int,
    }

    /// A completion queue.
    Cq = "struct ibv_cq" {
        /// Its device.
        context: *mut Context,
        /// Null: without events.
        channel: *mut CompChannel,
        /// The maker's.
        cq_context: *mut c_void,
        /// The kernel's.
        handle: u32,
        /// Entries.
        cqe: c_int,
    }

    /// A queue pair.
    Qp = "struct ibv_qp" {
        /// Its device.
        context: *mut Context,
        /// The maker's.
        qp_context: *mut c_void,
        /// Its domain.
        pd: *mut Pd,
        /// For work requests.
        send_cq: *mut Cq,
        /// For receives.
        recv_cq: *mut Cq,
        /// Null: receives of its own.
        srq: *mut c_void,
        /// The kernel's.
        handle: u32,
        /// On the fabric.
        qp_num: u32,
    }
}

/// A device as listed, known to the library alone.
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
    /// Addresses by the subnet manager.
    LINK_LAYER_INFINIBAND = IBV_LINK_LAYER_INFINIBAND: 1;
    /// Addresses by GID.
    LINK_LAYER_ETHERNET = IBV_LINK_LAYER_ETHERNET: 2;
    /// 256 bytes; each next one doubles.
    MTU_256 = IBV_MTU_256: 1;
    /// 4,096 bytes.
    MTU_4096 = IBV_MTU_4096: 5;
    /// An InfiniBand address.
    GID_TYPE_IB = IBV_GID_TYPE_IB: 0;
    /// On Ethernet, not routed.
    GID_TYPE_ROCE_V1 = IBV_GID_TYPE_ROCE_V1: 1;
    /// In UDP, routed.
    GID_TYPE_ROCE_V2 = IBV_GID_TYPE_ROCE_V2: 2;

    /// Peers' bytes and receives may be written to the memory.
    ACCESS_LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE: 1;
    /// Peers may WRITE; needs the former.
    ACCESS_REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE: 2;
    /// Writes may pass each other on their way to memory; ignored where it is not known.
    ACCESS_RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING: 0x10_0000;

    /// Reliable, connected.
    QPT_RC = IBV_QPT_RC: 2;
    /// New, or made so.
    QPS_RESET = IBV_QPS_RESET: 0;
    /// Receives may be posted.
    QPS_INIT = IBV_QPS_INIT: 1;
    /// Takes packets.
    QPS_RTR = IBV_QPS_RTR: 2;
    /// Sends, too.
    QPS_RTS = IBV_QPS_RTS: 3;
    /// All that is posted is flushed.
    QPS_ERR = IBV_QPS_ERR: 6;

    /// Of [`QpAttr`], as all these: `qp_state` is set.
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

    /// Bytes into the peer's memory; the peer is told nothing.
    WR_RDMA_WRITE = IBV_WR_RDMA_WRITE: 0;
    /// The same, and a receive of the peer completes with 32 bits.
    WR_RDMA_WRITE_WITH_IMM = IBV_WR_RDMA_WRITE_WITH_IMM: 1;
    /// A completion is wanted.
    SEND_SIGNALED = IBV_SEND_SIGNALED: 2;
    /// The bytes are taken when it is posted.
    SEND_INLINE = IBV_SEND_INLINE: 8;

    /// Done.
    WC_SUCCESS = IBV_WC_SUCCESS: 0;
    /// Local lengths are wrong.
    WC_LOC_LEN_ERR = IBV_WC_LOC_LEN_ERR: 1;
    /// The queue pair itself.
    WC_LOC_QP_OP_ERR = IBV_WC_LOC_QP_OP_ERR: 2;
    /// A piece is not within its registration.
    WC_LOC_PROT_ERR = IBV_WC_LOC_PROT_ERR: 4;
    /// Not carried out, since the queue pair had failed.
    WC_WR_FLUSH_ERR = IBV_WC_WR_FLUSH_ERR: 5;
    /// The peer says that the request makes no sense.
    WC_REM_INV_REQ_ERR = IBV_WC_REM_INV_REQ_ERR: 9;
    /// Not within the peer's registration, or not allowed.
    WC_REM_ACCESS_ERR = IBV_WC_REM_ACCESS_ERR: 10;
    /// The peer could not.
    WC_REM_OP_ERR = IBV_WC_REM_OP_ERR: 11;
    /// No answer.
    WC_RETRY_EXC_ERR = IBV_WC_RETRY_EXC_ERR: 12;
    /// The peer had no receive.
    WC_RNR_RETRY_EXC_ERR = IBV_WC_RNR_RETRY_EXC_ERR: 13;
    /// Of a WRITE, here.
    WC_RDMA_WRITE = IBV_WC_RDMA_WRITE: 1;
    /// Of a receive that got an immediate.
    WC_RECV_RDMA_WITH_IMM = IBV_WC_RECV_RDMA_WITH_IMM: 129;
    /// `imm_data` counts.
    WC_WITH_IMM = IBV_WC_WITH_IMM: 2;
}
