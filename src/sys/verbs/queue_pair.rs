//! Reliable connected queue pairs: create, connect, post, reset.
//!
//! Thread: one posts; another one can poll. Creating and changing enter the kernel. Posting does
//! not enter the kernel and allocates nothing.
//! Invariants: after a fault or [`QueuePair::fail`] everything posted is flushed.
//! [`QueuePair::reset`] discards it without a completion. After reset returns, no packet of the old
//! connection is accepted.
#![allow(unsafe_code)]

use super::abi::{self, AhAttr, Gid, GlobalRoute, Qp, QpAttr, QpCap, QpInitAttr, RecvWr};
use super::chain::Chain;
use super::completion::{CompletionQueue, Handle};
use super::device::{Domain, done, made};
use super::endpoint::{Endpoint, Route};
use crate::sys::last_resort;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::{fmt, io};

/// The capacity of a queue pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Uncompleted work requests.
    pub requests: u32,
    /// Uncompleted receives.
    pub receives: u32,
    /// Local pieces of a work request.
    pub pieces: u32,
    /// Inline bytes.
    pub inline: u32,
}

/// A queue pair.
pub struct QueuePair {
    qp: *mut Qp,
    number: u32,
    capacity: Capacity,
    takes_writes: bool,
    /// The local route and the announced sequence number, from [`QueuePair::open`] until the next
    /// reset.
    opened: Option<(Route, u32)>,
    domain: Arc<Domain>,
    /// The completion queues must outlive the queue pair.
    _completions: [Arc<Handle>; 2],
}

/// A chain that was not posted completely.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PostError {
    /// Number of work requests from its beginning that were posted.
    pub posted: usize,
    /// `ENOMEM`: the queue is full. Any other: the queue pair is not connected, or a request is
    /// invalid.
    pub error: i32,
}

// SAFETY: posting needs `&mut`, so one thread at a time; the library accepts any thread.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Creates a queue pair. Work requests complete into `sent` and receives into `received`, which
    /// can be the same queue. With `takes_writes` its peer can WRITE if the registration allows it.
    pub fn new(
        domain: &Arc<Domain>,
        sent: &CompletionQueue,
        received: &CompletionQueue,
        wanted: Capacity,
        takes_writes: bool,
    ) -> io::Result<QueuePair> {
        let mut attr = QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: sent.handle.cq,
            recv_cq: received.handle.cq,
            srq: std::ptr::null_mut(),
            cap: QpCap {
                max_send_wr: wanted.requests,
                max_recv_wr: wanted.receives,
                max_send_sge: wanted.pieces,
                max_recv_sge: 1,
                max_inline_data: wanted.inline,
            },
            qp_type: abi::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and the completion queues belong to one device; null is an error.
        let qp = made(unsafe { (domain.library().create_qp)(domain.pd, &mut attr) })?;
        // SAFETY: just created; the number never changes.
        let number = unsafe { (*qp).qp_num };
        let capacity = Capacity {
            requests: attr.cap.max_send_wr,
            receives: attr.cap.max_recv_wr,
            pieces: attr.cap.max_send_sge,
            inline: attr.cap.max_inline_data,
        };
        let completions = [sent.handle.clone(), received.handle.clone()];
        let domain = domain.clone();
        Ok(QueuePair {
            qp,
            number,
            capacity,
            takes_writes,
            opened: None,
            domain,
            _completions: completions,
        })
    }

    /// Its number on the fabric. Completions carry it.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The granted capacity: at least the requested one.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }

    /// Prepares a new or reset queue pair for receives, and returns the data for its peer.
    /// `sequence` must be random each time.
    pub fn open(&mut self, route: &Route, sequence: u32) -> io::Result<Endpoint> {
        let sequence = sequence & 0xff_ffff;
        let mut attr = unset();
        attr.qp_state = abi::QPS_INIT;
        attr.port_num = route.port;
        if self.takes_writes {
            attr.qp_access_flags = abi::ACCESS_LOCAL_WRITE | abi::ACCESS_REMOTE_WRITE;
        }
        self.modify(
            &mut attr,
            abi::QP_STATE | abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_ACCESS_FLAGS,
        )?;
        self.opened = Some((*route, sequence));
        Ok(Endpoint {
            number: self.number,
            sequence,
            gid: route.gid,
            lid: route.lid,
            mtu: route.mtu,
        })
    }

    /// Connects an opened queue pair. Each end must be connected before the first packet of the
    /// other end arrives. So post only after the peer has confirmed its connection.
    pub fn connect(&mut self, peer: &Endpoint) -> io::Result<()> {
        let (route, sequence) =
            self.opened.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        self.modify(&mut receiving(&route, peer), RECEIVING)?;
        self.modify(&mut sending(&route, sequence), SENDING)
    }

    /// Ends the connection: posted requests complete as flushed, packets of the peer are refused.
    pub fn fail(&mut self) -> io::Result<()> {
        let mut attr = unset();
        attr.qp_state = abi::QPS_ERR;
        self.modify(&mut attr, abi::QP_STATE)
    }

    /// Returns to the state after creation and discards everything posted. After this returns,
    /// nothing of the old connection can land.
    pub fn reset(&mut self) -> io::Result<()> {
        let mut attr = unset();
        attr.qp_state = abi::QPS_RESET;
        self.opened = None;
        self.modify(&mut attr, abi::QP_STATE)
    }

    /// Posts a chain with one doorbell. The NIC can read the memory of its pieces until the
    /// requests complete.
    #[inline]
    pub fn post(&mut self, chain: &mut Chain) -> Result<(), PostError> {
        let Some(first) = chain.linked() else {
            return Ok(());
        };
        let mut refused = std::ptr::null_mut();
        // SAFETY: the queue pair and its device live. The library leaves no function of an open
        // device null.
        let post = unsafe { (*(*self.qp).context).ops.post_send };
        // SAFETY: the function belongs to this queue pair. The chain ends in null and keeps the
        // registrations of its pieces, so inline bytes are readable now. The provider copies what
        // it needs.
        let result = unsafe { post(self.qp, first.as_ptr(), &mut refused) };
        match result {
            0 => Ok(()),
            error => Err(PostError { posted: chain.index_of(refused), error }),
        }
    }

    /// Posts a receive for an immediate, with no memory.
    #[inline]
    pub fn post_receive(&mut self, id: u64) -> Result<(), PostError> {
        let next = std::ptr::null_mut();
        let mut receive = RecvWr { wr_id: id, next, sg_list: std::ptr::null_mut(), num_sge: 0 };
        let mut refused = std::ptr::null_mut();
        // SAFETY: as in `post`.
        let post = unsafe { (*(*self.qp).context).ops.post_recv };
        // SAFETY: the function belongs to this queue pair and reads the receive only during the
        // call.
        match unsafe { post(self.qp, &mut receive, &mut refused) } {
            0 => Ok(()),
            error => Err(PostError { posted: 0, error }),
        }
    }

    fn modify(&mut self, attr: &mut QpAttr, mask: c_uint) -> io::Result<()> {
        // SAFETY: the queue pair lives, and the masked attributes are set.
        done(unsafe { (self.domain.library().modify_qp)(self.qp, attr, mask as c_int) })
    }
}

const RECEIVING: c_uint = abi::QP_STATE
    | abi::QP_AV
    | abi::QP_PATH_MTU
    | abi::QP_DEST_QPN
    | abi::QP_RQ_PSN
    | abi::QP_MAX_DEST_RD_ATOMIC
    | abi::QP_MIN_RNR_TIMER;

fn receiving(route: &Route, peer: &Endpoint) -> QpAttr {
    /// 0.64 ms. It is rarely needed, because receives are posted ahead.
    const PAUSE: u8 = 12;
    /// More than in any fabric.
    const HOPS_MAX: u8 = 64;
    let mut attr = unset();
    attr.qp_state = abi::QPS_RTR;
    attr.path_mtu = mtu_code(route.mtu.min(peer.mtu));
    attr.dest_qp_num = peer.number & 0xff_ffff;
    attr.rq_psn = peer.sequence & 0xff_ffff;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = PAUSE;
    attr.ah_attr = AhAttr {
        grh: GlobalRoute {
            dgid: Gid { raw: peer.gid },
            flow_label: 0,
            sgid_index: route.gid_index,
            hop_limit: HOPS_MAX,
            traffic_class: route.traffic_class,
        },
        dlid: peer.lid,
        sl: 0,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: route.port,
    };
    attr
}

const SENDING: c_uint = abi::QP_STATE
    | abi::QP_TIMEOUT
    | abi::QP_RETRY_CNT
    | abi::QP_RNR_RETRY
    | abi::QP_SQ_PSN
    | abi::QP_MAX_QP_RD_ATOMIC;

fn sending(route: &Route, sequence: u32) -> QpAttr {
    let mut attr = unset();
    attr.qp_state = abi::QPS_RTS;
    attr.timeout = route.timeout & 31;
    attr.retry_cnt = route.retries & 7;
    attr.rnr_retry = route.receive_retries & 7;
    attr.sq_psn = sequence;
    attr.max_rd_atomic = 1;
    attr
}

fn unset() -> QpAttr {
    // SAFETY: the struct holds plain numbers, and zeros are valid values.
    unsafe { std::mem::zeroed() }
}

/// The largest MTU code of at most `bytes`. The minimum is 256 bytes, which every port carries.
fn mtu_code(bytes: u16) -> c_uint {
    (abi::MTU_256..=abi::MTU_4096)
        .rev()
        .find(|code| 128 << code <= u32::from(bytes))
        .unwrap_or(abi::MTU_256)
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once. Everything posted is discarded.
        let failed = unsafe { (self.domain.library().destroy_qp)(self.qp) } != 0;
        // A remaining queue pair could still read and write memory. A reset stops that, too.
        if failed && self.reset().is_err() {
            // The caller is about to reuse the memory.
            let number = self.number;
            last_resort::end(format_args!(
                "queue pair {number} can neither be destroyed nor reset"
            ));
        }
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair").field("number", &self.number).finish_non_exhaustive()
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = io::Error::from_raw_os_error(self.error);
        write!(f, "refused after {} work requests: {error}", self.posted)
    }
}

impl std::error::Error for PostError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_no_larger_than_both_ends_carry() {
        let codes = [0, 255, 256, 1023, 1024, 4095, 4096, u16::MAX].map(mtu_code);
        assert_eq!(codes, [1, 1, 1, 2, 3, 4, 5, 5]);
    }
}
