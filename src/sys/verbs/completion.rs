//! Completion queues: the outcomes of work requests and receives.
//!
//! Thread: one thread polls. Polling allocates nothing and does not enter the kernel. Requesting
//! and clearing events enters the kernel.
#![allow(unsafe_code)]

use super::abi::{self, CompChannel, Cq, Wc};
use super::device::{Device, made};
use std::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::{fmt, io};

/// A completion queue, shared by the queue pairs created with it.
#[derive(Debug)]
pub struct CompletionQueue {
    pub(super) handle: Arc<Handle>,
    channel: Option<Channel>,
}

/// The queue itself. It outlives the queue pairs that use it.
pub(super) struct Handle {
    pub(super) cq: *mut Cq,
    pub(super) device: Arc<Device>,
    channel: *mut CompChannel,
}

/// The descriptor of its events.
#[derive(Debug)]
struct Channel {
    fd: c_int,
}

// SAFETY: the library's functions allow any thread; only `CompletionQueue` polls, by `&mut`.
unsafe impl Send for Handle {}
// SAFETY: as above; other owners hold it without using it.
unsafe impl Sync for Handle {}

impl CompletionQueue {
    /// A queue for `entries` completions, without events. It must never overflow: an overflow fails
    /// all its queue pairs.
    pub fn new(device: &Arc<Device>, entries: u32) -> io::Result<CompletionQueue> {
        Ok(CompletionQueue {
            handle: Arc::new(Handle::new(device, entries, std::ptr::null_mut())?),
            channel: None,
        })
    }

    /// A queue with a descriptor that becomes readable, for waiting threads.
    pub fn with_events(device: &Arc<Device>, entries: u32) -> io::Result<CompletionQueue> {
        // SAFETY: the device is open; null is an error.
        let channel = made(unsafe { (device.library.create_comp_channel)(device.context) })?;
        // SAFETY: just created; the channel keeps the descriptor.
        let fd = unsafe { (*channel).fd };
        let handle = Handle::new(device, entries, channel).inspect_err(|_| {
            // SAFETY: created above, and no queue uses it.
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

    /// Takes all available completions that fit into `into`. Its previous content is dropped.
    #[inline]
    pub fn poll(&mut self, into: &mut Completions) -> io::Result<usize> {
        into.filled = 0;
        let room = into.entries.len() as c_int;
        let cq = self.handle.cq;
        // SAFETY: the queue and its device live. The library leaves no function of an open device
        // null.
        let poll = unsafe { (*(*cq).context).ops.poll_cq };
        // SAFETY: the function belongs to this queue, and there is room for `room` entries.
        let taken = unsafe { poll(cq, room, into.entries.as_mut_ptr()) };
        into.filled =
            usize::try_from(taken).map_err(|_| io::Error::from_raw_os_error(libc::EIO))?;
        debug_assert!(into.filled <= into.entries.len());
        Ok(into.filled)
    }

    /// Requests that the next completion makes the descriptor readable. Earlier completions cause
    /// no event, so poll once more before waiting.
    pub fn request_event(&mut self) -> io::Result<()> {
        let cq = self.handle.cq;
        // SAFETY: as in `poll`.
        let request = unsafe { (*(*cq).context).ops.req_notify_cq };
        // SAFETY: the function belongs to this queue; 0 means any completion.
        super::device::done(unsafe { request(cq, 0) })
    }

    /// Takes all pending events, so that the descriptor is no longer readable.
    pub fn clear_events(&mut self) {
        if self.channel.is_none() {
            return;
        }
        let library = self.handle.device.library;
        let (mut cq, mut context) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is non-blocking, both places are writable, and one queue uses the
        // channel.
        while unsafe { (library.get_cq_event)(self.handle.channel, &mut cq, &mut context) } == 0 {
            // SAFETY: the queue lives. Each event is acknowledged once; otherwise `destroy_cq`
            // would wait for it.
            unsafe { (library.ack_cq_events)(self.handle.cq, 1) };
        }
    }

    /// Becomes readable after [`CompletionQueue::request_event`]. `None` for a queue without
    /// events.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the channel keeps it open as long as the queue.
        self.channel.as_ref().map(|channel| unsafe { BorrowedFd::borrow_raw(channel.fd) })
    }
}

impl Handle {
    fn new(device: &Arc<Device>, entries: u32, channel: *mut CompChannel) -> io::Result<Handle> {
        let entries =
            c_int::try_from(entries).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        let context = std::ptr::null_mut();
        // SAFETY: the device is open and `channel` is null or belongs to it; null is an error.
        let cq = made(unsafe {
            (device.library.create_cq)(device.context, entries, context, channel, 0)
        })?;
        Ok(Handle { cq, device: device.clone(), channel })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: created by `new`, destroyed once. Queue pairs hold an `Arc` of it, and all events
        // were acknowledged.
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

/// A buffer for the completions of one poll.
pub struct Completions {
    entries: Box<[Wc]>,
    filled: usize,
}

impl Completions {
    /// Room for `entries` completions.
    pub fn new(entries: usize) -> Completions {
        // SAFETY: the struct holds plain numbers, and zeros are valid values.
        let empty: Wc = unsafe { std::mem::zeroed() };
        Completions {
            entries: vec![empty; entries.clamp(1, c_int::MAX as usize)].into(),
            filled: 0,
        }
    }

    /// The completions of the last poll, oldest first.
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

/// The outcome of a work request or receive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// The id from posting. Earlier work requests of the queue pair have ended, too.
    pub id: u64,
    /// The local number of its queue pair.
    pub queue_pair: u32,
    /// Its outcome.
    pub outcome: Result<CompletionKind, CompletionError>,
}

/// The kind of a request that succeeded. A failed completion carries no kind; its id identifies the
/// request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionKind {
    /// The peer's NIC has written the bytes to the peer's memory.
    Written,
    /// A peer has written. All its earlier bytes on this queue pair are in local memory.
    Notified {
        /// The value from the peer.
        immediate: u32,
    },
    /// Another kind, with its number.
    Other(u32),
}

/// Why a work request or receive failed. After each of these the queue pair flushes everything
/// posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CompletionError {
    /// Not executed because another request had failed or the queue pair was ended.
    Flushed,
    /// A local piece lies outside its registration.
    LocalProtection,
    /// The device could not send it: no route to the peer, or a device fault.
    LocalOperation,
    /// The peer's memory cannot be written: key, bounds or permission.
    RemoteAccess,
    /// The peer did not answer any retry.
    NoAnswer,
    /// The peer had no receive posted for any retry.
    NoReceive,
    /// The peer found the request invalid, or could not execute it.
    RemoteOperation,
    /// Another error, with its number.
    Other(u32),
}

impl Completion {
    #[inline]
    fn from_entry(entry: &Wc) -> Completion {
        let outcome = match entry.status {
            abi::WC_SUCCESS => Ok(CompletionKind::from_entry(entry)),
            status => Err(CompletionError::from_status(status)),
        };
        Completion { id: entry.wr_id, queue_pair: entry.qp_num, outcome }
    }
}

impl CompletionKind {
    #[inline]
    fn from_entry(entry: &Wc) -> CompletionKind {
        match entry.opcode {
            abi::WC_RDMA_WRITE => CompletionKind::Written,
            abi::WC_RECV_RDMA_WITH_IMM if entry.wc_flags & abi::WC_WITH_IMM != 0 => {
                CompletionKind::Notified { immediate: u32::from_be(entry.imm_data) }
            }
            other => CompletionKind::Other(other),
        }
    }
}

impl CompletionError {
    /// The status number that devices use.
    pub(super) fn status(self) -> u32 {
        match self {
            CompletionError::Flushed => abi::WC_WR_FLUSH_ERR,
            CompletionError::LocalProtection => abi::WC_LOC_PROT_ERR,
            CompletionError::LocalOperation => abi::WC_LOC_QP_OP_ERR,
            CompletionError::RemoteAccess => abi::WC_REM_ACCESS_ERR,
            CompletionError::NoAnswer => abi::WC_RETRY_EXC_ERR,
            CompletionError::NoReceive => abi::WC_RNR_RETRY_EXC_ERR,
            CompletionError::RemoteOperation => abi::WC_REM_OP_ERR,
            CompletionError::Other(status) => status,
        }
    }

    #[cold]
    fn from_status(status: u32) -> CompletionError {
        match status {
            abi::WC_WR_FLUSH_ERR => CompletionError::Flushed,
            abi::WC_LOC_PROT_ERR => CompletionError::LocalProtection,
            abi::WC_LOC_QP_OP_ERR => CompletionError::LocalOperation,
            abi::WC_REM_ACCESS_ERR => CompletionError::RemoteAccess,
            abi::WC_RETRY_EXC_ERR => CompletionError::NoAnswer,
            abi::WC_RNR_RETRY_EXC_ERR => CompletionError::NoReceive,
            abi::WC_REM_INV_REQ_ERR | abi::WC_REM_OP_ERR => CompletionError::RemoteOperation,
            other => CompletionError::Other(other),
        }
    }
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CompletionError::Flushed => "flushed with its queue pair",
            CompletionError::LocalProtection => "local memory is not registered for this",
            CompletionError::LocalOperation => "the device could not send it",
            CompletionError::RemoteAccess => "peer's memory denied it: key, bounds or permission",
            CompletionError::NoAnswer => "no answer from the peer, retries exhausted",
            CompletionError::NoReceive => "the peer had no receive posted, retries exhausted",
            CompletionError::RemoteOperation => "the peer could not execute it",
            CompletionError::Other(status) => return write!(f, "work completion status {status}"),
        })
    }
}

impl std::error::Error for CompletionError {}
