//! Completion queues: what became of work requests and receives.
//!
//! Thread: one polls. Polling allocates nothing and does not enter the kernel; only asking for an event and
//! taking it does.
#![allow(unsafe_code)]

use super::abi::{self, CompChannel, Cq, Wc};
use super::device::{Device, made};
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// A queue of completions, shared by the queue pairs that were made with it.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(super) handle: Arc<Handle>,
    channel: Option<Channel>,
}

/// The queue itself, which outlives the queue pairs that fill it.
pub(super) struct Handle {
    pub(super) cq: *mut Cq,
    pub(super) device: Arc<Device>,
    channel: *mut CompChannel,
}

/// Where its events arrive.
#[derive(Debug)]
struct Channel {
    fd: c_int,
}

// SAFETY: the library's functions allow any thread; `CompletionQueue` alone polls, by `&mut`.
unsafe impl Send for Handle {}
// SAFETY: as above; others hold it without using it.
unsafe impl Sync for Handle {}

impl CompletionQueue {
    /// A queue for `entries` completions, without events. It must never overflow: that ends all its queue
    /// pairs.
    pub fn new(device: &Arc<Device>, entries: u32) -> io::Result<CompletionQueue> {
        Ok(CompletionQueue {
            handle: Arc::new(Handle::new(device, entries, std::ptr::null_mut())?),
            channel: None,
        })
    }

    /// A queue with a descriptor that becomes readable, for threads that wait.
    pub fn with_events(device: &Arc<Device>, entries: u32) -> io::Result<CompletionQueue> {
        // SAFETY: an open device; null is an error.
        let channel = made(unsafe { (device.library.create_comp_channel)(device.context) })?;
        // SAFETY: just made; the descriptor stays the channel's.
        let fd = unsafe { (*channel).fd };
        let handle = Handle::new(device, entries, channel).inspect_err(|_| {
            // SAFETY: made above, and no queue uses it.
            unsafe { (device.library.destroy_comp_channel)(channel) };
        })?;
        // SAFETY: an open descriptor and integers.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        // SAFETY: as above.
        if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(CompletionQueue { handle: Arc::new(handle), channel: Some(Channel { fd }) })
    }

    /// Takes as many completions as there are and as have room; what was in `into` is over.
    #[inline]
    pub fn poll(&mut self, into: &mut Completions) -> io::Result<usize> {
        into.filled = 0;
        let room = into.entries.len() as c_int;
        let cq = self.handle.cq;
        // SAFETY: the queue and its device live; the library leaves no function of an open device null.
        let poll = unsafe { (*(*cq).context).ops.poll_cq };
        // SAFETY: this queue's function, and room for as many as are told.
        let taken = unsafe { poll(cq, room, into.entries.as_mut_ptr()) };
        into.filled =
            usize::try_from(taken).map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
        debug_assert!(into.filled <= into.entries.len());
        Ok(into.filled)
    }

    /// Asks that the descriptor become readable with the next completion that is added. What was added before
    /// rings nothing: poll once more before waiting.
    pub fn request_event(&mut self) -> io::Result<()> {
        let cq = self.handle.cq;
        // SAFETY: as in `poll`.
        let request = unsafe { (*(*cq).context).ops.req_notify_cq };
        // SAFETY: this queue's function; 0: any completion.
        super::device::done(unsafe { request(cq, 0) })
    }

    /// Takes the events that have come, so that the descriptor is no longer readable.
    pub fn clear_events(&mut self) {
        if self.channel.is_none() {
            return;
        }
        let library = self.handle.device.library;
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: our channel, which does not wait, and places for what it says; one queue uses it.
        while unsafe { (library.get_cq_event)(self.handle.channel, &mut cq, &mut context) } == 0 {
            // SAFETY: the queue lives; each event is acknowledged once, or its end would wait for it.
            unsafe { (library.ack_cq_events)(self.handle.cq, 1) };
        }
    }

    /// Becomes readable after [`CompletionQueue::request_event`]. None of a queue without events.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the channel's, open as long as the queue.
        self.channel.as_ref().map(|channel| unsafe { BorrowedFd::borrow_raw(channel.fd) })
    }
}

impl Handle {
    fn new(device: &Arc<Device>, entries: u32, channel: *mut CompChannel) -> io::Result<Handle> {
        let entries =
            c_int::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let context = std::ptr::null_mut();
        // SAFETY: an open device, and null or a channel of it; null is an error.
        let cq = made(unsafe {
            (device.library.create_cq)(device.context, entries, context, channel, 0)
        })?;
        Ok(Handle { cq, device: device.clone(), channel })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `new`, ended once; queue pairs hold an `Arc` of it, and all events were acknowledged.
        unsafe { (self.device.library.destroy_cq)(self.cq) };
        if !self.channel.is_null() {
            // SAFETY: as above; the one queue that used it is gone.
            unsafe { (self.device.library.destroy_comp_channel)(self.channel) };
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CompletionQueue").field(&self.device).finish()
    }
}

/// Room for what one poll takes.
pub struct Completions {
    entries: Box<[Wc]>,
    filled: usize,
}

impl Completions {
    /// Room for `entries`.
    pub fn new(entries: usize) -> Completions {
        // SAFETY: plain numbers, for which zeros are values.
        let empty: Wc = unsafe { std::mem::zeroed() };
        Completions {
            entries: vec![empty; entries.clamp(1, c_int::MAX as usize)].into(),
            filled: 0,
        }
    }

    /// What the last poll took, oldest first.
    #[inline]
    pub fn iter(&self) -> impl Iterator<Item = Completion> + '_ {
        self.entries[..self.filled].iter().map(Completion::from_entry)
    }
}

impl fmt::Debug for Completions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// The end of a work request or receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Given when it was posted. Work requests before it on its queue pair have ended, too.
    pub id: u64,
    /// Number of its queue pair, here.
    pub queue_pair: u32,
    /// What became of it.
    pub outcome: Result<Ended, Fault>,
}

/// What has ended well. A fault does not say which it was: ids tell them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ended {
    /// Our bytes lie in the peer's memory, as far as the peer's NIC is concerned.
    Written,
    /// A peer has written, and the bytes of all it wrote before on this queue pair lie here.
    Notified {
        /// As the peer said.
        immediate: u32,
    },
    /// Anything else, by its number.
    Other(u32),
}

/// Why a work request or receive has failed. After any of these the queue pair flushes all that is posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Not carried out, since another one had failed or the queue pair was ended.
    Flushed,
    /// A local piece lies outside its registration.
    LocalProtection,
    /// The device could not send it: no way to the peer, or a fault of its own.
    LocalOperation,
    /// The peer's memory is not ours to write: key, bounds or permission.
    RemoteAccess,
    /// The peer did not answer, however often it was asked.
    NoAnswer,
    /// The peer had no receive posted, however often it was asked.
    NoReceive,
    /// The peer finds the request wrong, or could not carry it out.
    RemoteOperation,
    /// Another one, by its number.
    Other(u32),
}

impl Completion {
    #[inline]
    fn from_entry(entry: &Wc) -> Completion {
        let outcome = match entry.status {
            abi::WC_SUCCESS => Ok(Ended::from_entry(entry)),
            status => Err(Fault::from_status(status)),
        };
        Completion { id: entry.wr_id, queue_pair: entry.qp_num, outcome }
    }
}

impl Ended {
    #[inline]
    fn from_entry(entry: &Wc) -> Ended {
        match entry.opcode {
            abi::WC_RDMA_WRITE => Ended::Written,
            abi::WC_RECV_RDMA_WITH_IMM if entry.wc_flags & abi::WC_WITH_IMM != 0 => {
                Ended::Notified { immediate: u32::from_be(entry.imm_data) }
            }
            other => Ended::Other(other),
        }
    }
}

impl Fault {
    /// As devices number it.
    pub(super) fn status(self) -> u32 {
        match self {
            Fault::Flushed => abi::WC_WR_FLUSH_ERR,
            Fault::LocalProtection => abi::WC_LOC_PROT_ERR,
            Fault::LocalOperation => abi::WC_LOC_QP_OP_ERR,
            Fault::RemoteAccess => abi::WC_REM_ACCESS_ERR,
            Fault::NoAnswer => abi::WC_RETRY_EXC_ERR,
            Fault::NoReceive => abi::WC_RNR_RETRY_EXC_ERR,
            Fault::RemoteOperation => abi::WC_REM_OP_ERR,
            Fault::Other(status) => status,
        }
    }

    #[cold]
    fn from_status(status: u32) -> Fault {
        match status {
            abi::WC_WR_FLUSH_ERR => Fault::Flushed,
            abi::WC_LOC_PROT_ERR => Fault::LocalProtection,
            abi::WC_LOC_QP_OP_ERR => Fault::LocalOperation,
            abi::WC_REM_ACCESS_ERR => Fault::RemoteAccess,
            abi::WC_RETRY_EXC_ERR => Fault::NoAnswer,
            abi::WC_RNR_RETRY_EXC_ERR => Fault::NoReceive,
            abi::WC_REM_INV_REQ_ERR | abi::WC_REM_OP_ERR => Fault::RemoteOperation,
            other => Fault::Other(other),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::Flushed => "flushed with its queue pair",
            Fault::LocalProtection => "local memory not registered so",
            Fault::LocalOperation => "the device could not send it",
            Fault::RemoteAccess => "the peer's memory refuses it: key, bounds or permission",
            Fault::NoAnswer => "no answer from the peer, retries exhausted",
            Fault::NoReceive => "the peer had no receive posted, retries exhausted",
            Fault::RemoteOperation => "the peer could not carry it out",
            Fault::Other(status) => return write!(f, "work completion status {status}"),
        })
    }
}

impl std::error::Error for Fault {}
