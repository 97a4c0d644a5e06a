//! This provider's implementation of the functions of the library and of an open device. Each
//! object begins with the struct of the library's object, so that a pointer to one is a pointer to
//! the other.
//!
//! No panic unwinds through the C interface: it ends the process.
#![allow(unsafe_code)]

use super::queue::{Room, WorkQueue};
use super::wire::{Entries, Pair, Registered};
use super::{DeviceFault, Shared};
use crate::sys::verbs::abi::{
    self, CompChannel, Context, ContextOps, Cq, DeviceAttr, Gid, GidEntry, ListedDevice, Mr, Pd,
    PortAttr, Qp, QpAttr, QpInitAttr, RecvWr, SendWr, Wc,
};
use crate::sys::verbs::library::Library;
use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(super) static LIBRARY: Library = Library {
    get_device_list,
    free_device_list,
    get_device_name,
    open_device,
    close_device,
    query_device,
    query_port,
    query_gid_table,
    alloc_pd,
    dealloc_pd,
    reg_mr,
    dereg_mr,
    create_comp_channel,
    destroy_comp_channel,
    create_cq,
    destroy_cq,
    get_cq_event,
    ack_cq_events,
    create_qp,
    modify_qp,
    destroy_qp,
};

/// The only GID.
pub(super) const GID: Gid = Gid { raw: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1] };
pub(super) const NAME: &std::ffi::CStr = c"memory0";

const REQUESTS_MAX: u32 = 1 << 15;
const PIECES_MAX: u32 = 30;
const INLINE_MAX: u32 = 256;

#[repr(C)]
struct OpenDevice {
    head: Context,
    shared: Arc<Shared>,
    region_max: u64,
    place: u32,
}

#[repr(C)]
struct Channel {
    head: CompChannel,
    queue: *mut Cq,
}

#[repr(C)]
struct Queue {
    head: Cq,
    entries: Arc<Entries>,
    shared: Arc<Shared>,
}

#[repr(C)]
struct ProviderQueuePair {
    head: Qp,
    queue: Arc<WorkQueue>,
    shared: Arc<Shared>,
}

/// Creates an object and returns a pointer to its head.
fn made<T, H>(object: T) -> *mut H {
    Box::into_raw(Box::new(object)).cast()
}

/// # Safety
/// Created by [`made`] from a `T`, which begins with `H`; not used afterwards.
unsafe fn ended<T, H>(head: *mut H) {
    // SAFETY: by the caller.
    drop(unsafe { Box::from_raw(head.cast::<T>()) });
}

fn refused<T>(error: c_int) -> *mut T {
    // SAFETY: `errno` belongs to this thread.
    unsafe { *libc::__errno_location() = error };
    null_mut()
}

/// # Safety
/// An open device of this provider.
unsafe fn device<'a>(context: *mut Context) -> &'a OpenDevice {
    // SAFETY: by the caller; callers keep the device open during use.
    unsafe { &*context.cast::<OpenDevice>() }
}

/// # Safety
/// As for [`device`].
unsafe fn shared<'a>(context: *mut Context) -> &'a Arc<Shared> {
    // SAFETY: by the caller.
    unsafe { &device(context).shared }
}

/// # Safety
/// As for [`device`].
unsafe fn has_fault(context: *mut Context, fault: DeviceFault) -> bool {
    // SAFETY: by the caller.
    let device = unsafe { device(context) };
    device.shared.has_fault(device.place, fault)
}

/// A device is opened by the handle of its fabric, not from a list.
unsafe extern "C" fn get_device_list(_count: *mut c_int) -> *mut *mut ListedDevice {
    refused(libc::ENOSYS)
}

unsafe extern "C" fn free_device_list(_list: *mut *mut ListedDevice) {}

unsafe extern "C" fn get_device_name(_device: *mut ListedDevice) -> *const c_char {
    NAME.as_ptr()
}

unsafe extern "C" fn open_device(device: *mut ListedDevice) -> *mut Context {
    let raw = device.cast_const().cast::<Shared>();
    // SAFETY: `Fabric` passes the pointer of its `Arc`, which it still holds.
    let shared = unsafe {
        Arc::increment_strong_count(raw);
        Arc::from_raw(raw)
    };
    let none = null_mut();
    let ops = ContextOps {
        _compat_query_device: [none; 11],
        poll_cq,
        req_notify_cq,
        _compat_cq_event: [none; 12],
        post_send,
        post_recv,
        _compat_create_ah: [none; 5],
    };
    let head = Context { device, ops, cmd_fd: -1, async_fd: -1, num_comp_vectors: 1 };
    let region_max = shared.region_max.load(Ordering::Relaxed);
    let place = shared.place.load(Ordering::Relaxed);
    made(OpenDevice { head, shared, region_max, place })
}

unsafe extern "C" fn close_device(context: *mut Context) -> c_int {
    // SAFETY: created by `open_device`; the library's user closes it once.
    unsafe { ended::<OpenDevice, _>(context) };
    0
}

unsafe extern "C" fn query_device(context: *mut Context, attr: *mut DeviceAttr) -> c_int {
    // SAFETY: the device is open and `attr` is writable; zeros are valid values.
    unsafe {
        attr.write_bytes(0, 1);
        (*attr).max_mr_size = device(context).region_max;
        (*attr).max_qp_wr = REQUESTS_MAX as c_int;
        (*attr).max_sge = PIECES_MAX as c_int;
        (*attr).phys_port_cnt = 1;
    }
    0
}

unsafe extern "C" fn query_port(_context: *mut Context, _port: u8, attr: *mut PortAttr) -> c_int {
    // SAFETY: `attr` is writable; zeros are valid values.
    unsafe {
        attr.write_bytes(0, 1);
        (*attr).state = abi::PORT_ACTIVE;
        (*attr).active_mtu = abi::MTU_4096;
        (*attr).link_layer = abi::LINK_LAYER_ETHERNET as u8;
    }
    0
}

unsafe extern "C" fn query_gid_table(
    _context: *mut Context,
    table: *mut GidEntry,
    room: usize,
    _flags: u32,
    _size: usize,
) -> isize {
    let entry = GidEntry {
        gid: GID,
        gid_index: 0,
        port_num: 1,
        gid_type: abi::GID_TYPE_ROCE_V2,
        ndev_ifindex: 0,
    };
    if room == 0 {
        return 0;
    }
    // SAFETY: the table has room for an entry.
    unsafe { table.write(entry) };
    1
}

unsafe extern "C" fn alloc_pd(context: *mut Context) -> *mut Pd {
    made(Pd { context, handle: 0 })
}

unsafe extern "C" fn dealloc_pd(pd: *mut Pd) -> c_int {
    // SAFETY: created by `alloc_pd`, ended once.
    unsafe { ended::<Pd, _>(pd) };
    0
}

unsafe extern "C" fn reg_mr(
    pd: *mut Pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    // SAFETY: the domain lives.
    let context = unsafe { (*pd).context };
    // SAFETY: the device of the domain is open.
    let device = unsafe { device(context) };
    if length as u64 > device.region_max {
        return refused(libc::EINVAL);
    }
    let mut wire = device.shared.wire();
    let remote_write = access & abi::ACCESS_REMOTE_WRITE != 0;
    let registered =
        Registered { domain: pd.addr(), address: iova, len: length as u64, remote_write };
    wire.last_number += 1;
    // As with NICs: an index and a separate byte, so that keys of neighbours are not easy to guess.
    let key = wire.last_number << 8 | wire.last_number.wrapping_mul(0x9d) & 0xff;
    wire.registrations.insert(key, registered);
    made(Mr { context, pd, addr, length, handle: 0, lkey: key, rkey: key })
}

unsafe extern "C" fn dereg_mr(mr: *mut Mr) -> c_int {
    // SAFETY: created by `reg_mr`, ended once.
    unsafe {
        shared((*mr).context).wire().registrations.remove(&(*mr).rkey);
        ended::<Mr, _>(mr);
    }
    0
}

unsafe extern "C" fn create_comp_channel(context: *mut Context) -> *mut CompChannel {
    // SAFETY: no pointers; the result is checked.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
    if fd < 0 {
        return null_mut();
    }
    made(Channel { head: CompChannel { context, fd, refcnt: 0 }, queue: null_mut() })
}

unsafe extern "C" fn destroy_comp_channel(channel: *mut CompChannel) -> c_int {
    // SAFETY: created by `create_comp_channel`, ended once.
    unsafe {
        libc::close((*channel).fd);
        ended::<Channel, _>(channel);
    }
    0
}

unsafe extern "C" fn create_cq(
    context: *mut Context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut CompChannel,
    _vector: c_int,
) -> *mut Cq {
    if cqe <= 0 {
        return refused(libc::EINVAL);
    }
    // SAFETY: null or a channel that lives.
    let events = unsafe { channel.as_ref() }.map_or(-1, |channel| channel.fd);
    let head = Cq { context, channel, cq_context, handle: 0, cqe };
    let entries = Arc::new(Entries::new(cqe as usize, events));
    // SAFETY: the device is open.
    let shared = unsafe { shared(context) }.clone();
    let queue = made(Queue { head, entries, shared });
    if !channel.is_null() {
        // SAFETY: created by `create_comp_channel`. Users of this library give each queue its own
        // channel.
        unsafe { (*channel.cast::<Channel>()).queue = queue };
    }
    queue
}

unsafe extern "C" fn destroy_cq(cq: *mut Cq) -> c_int {
    // SAFETY: created by `create_cq`, ended once. A queue pair that stays causes no event any more.
    unsafe {
        let own = &*cq.cast::<Queue>();
        // Events are written under this lock, so none is half written when the channel is closed.
        let wire = own.shared.wire();
        own.entries.armed.store(false, Ordering::Release);
        drop(wire);
        ended::<Queue, _>(cq);
    }
    0
}

unsafe extern "C" fn get_cq_event(
    channel: *mut CompChannel,
    cq: *mut *mut Cq,
    context: *mut *mut c_void,
) -> c_int {
    let mut count = [0u8; 8];
    // SAFETY: the channel lives, eight bytes are writable, and so are the caller's places.
    unsafe {
        if libc::read((*channel).fd, count.as_mut_ptr().cast(), count.len()) != 8 {
            return -1;
        }
        *cq = (*channel.cast::<Channel>()).queue;
        *context = (**cq).cq_context;
    }
    0
}

unsafe extern "C" fn ack_cq_events(_cq: *mut Cq, _events: c_uint) {}

unsafe extern "C" fn create_qp(pd: *mut Pd, attr: *mut QpInitAttr) -> *mut Qp {
    // SAFETY: the caller's attributes are writable; the domain and the queues live.
    let (attr, context) = unsafe { (&mut *attr, (*pd).context) };
    let cap = &attr.cap;
    let fits = cap.max_send_wr <= REQUESTS_MAX && cap.max_recv_wr <= REQUESTS_MAX;
    if !fits || cap.max_send_sge > PIECES_MAX || cap.max_inline_data > INLINE_MAX {
        return refused(libc::EINVAL);
    }
    let room =
        Room { requests: cap.max_send_wr, pieces: cap.max_send_sge, inline: cap.max_inline_data };
    let queue = Arc::new(WorkQueue::new(room));
    // SAFETY: the device is open.
    let place = unsafe { device(context) }.place;
    // SAFETY: the queues belong to this provider.
    let entries = |cq: *mut Cq| unsafe { (*cq.cast::<Queue>()).entries.clone() };
    let pair = Pair {
        queue: queue.clone(),
        sent: entries(attr.send_cq),
        received: entries(attr.recv_cq),
        domain: pd.addr(),
        place,
        state: abi::QPS_RESET,
        takes_writes: false,
        peer: 0,
        expected: 0,
        sequence: 0,
        receive_retries: 0,
        receives: VecDeque::with_capacity(cap.max_recv_wr as usize),
        receives_max: cap.max_recv_wr as usize,
        next_status: None,
        completions_lost: 0,
    };
    // SAFETY: the device is open.
    let shared = unsafe { shared(context) }.clone();
    let number = {
        let mut wire = shared.wire();
        wire.last_number += 1;
        let number = wire.last_number;
        wire.pairs.insert(number, pair);
        number
    };
    let head = Qp {
        context,
        qp_context: attr.qp_context,
        pd,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: null_mut(),
        handle: 0,
        qp_num: number,
    };
    made(ProviderQueuePair { head, queue, shared })
}

unsafe extern "C" fn modify_qp(qp: *mut Qp, attr: *mut QpAttr, _mask: c_int) -> c_int {
    // SAFETY: the queue pair lives, and the caller's attributes are readable.
    let (own, attr) = unsafe { (&*qp.cast::<ProviderQueuePair>(), &*attr) };
    // SAFETY: the device of the queue pair is open.
    let keeps = unsafe { has_fault(own.head.context, DeviceFault::KeepsPairs) };
    if keeps && attr.qp_state == abi::QPS_RESET {
        return libc::EIO;
    }
    let number = own.head.qp_num;
    let mut wire = own.shared.wire();
    let Some(pair) = wire.pairs.get_mut(&number) else {
        return libc::EINVAL;
    };
    match (pair.state, attr.qp_state) {
        (_, abi::QPS_RESET) => {
            pair.state = abi::QPS_RESET;
            wire.forget(number);
            return 0;
        }
        (_, abi::QPS_ERR) => {
            wire.end(number);
            return 0;
        }
        (abi::QPS_RESET, abi::QPS_INIT) => {
            pair.takes_writes = attr.qp_access_flags & abi::ACCESS_REMOTE_WRITE != 0;
        }
        (abi::QPS_INIT, abi::QPS_RTR) => {
            (pair.peer, pair.expected) = (attr.dest_qp_num, attr.rq_psn)
        }
        (abi::QPS_RTR, abi::QPS_RTS) => {
            (pair.sequence, pair.receive_retries) = (attr.sq_psn, attr.rnr_retry);
        }
        _ => return libc::EINVAL,
    }
    pair.state = attr.qp_state;
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut Qp) -> c_int {
    // SAFETY: created by `create_qp`, ended once. Its device is open.
    unsafe {
        let own = &*qp.cast::<ProviderQueuePair>();
        if has_fault(own.head.context, DeviceFault::KeepsPairs) {
            return libc::EIO;
        }
        let mut wire = own.shared.wire();
        wire.forget(own.head.qp_num);
        wire.pairs.remove(&own.head.qp_num);
        drop(wire);
        ended::<ProviderQueuePair, _>(qp);
    }
    0
}

unsafe extern "C" fn post_send(qp: *mut Qp, request: *mut SendWr, bad: *mut *mut SendWr) -> c_int {
    // SAFETY: the queue pair lives.
    let own = unsafe { &*qp.cast::<ProviderQueuePair>() };
    own.shared.keep();
    // SAFETY: the caller's chain is valid; one thread posts.
    match unsafe { own.queue.post(request) } {
        Ok(()) => 0,
        Err((refused, error)) => {
            // SAFETY: the caller's place is writable.
            unsafe { *bad = refused };
            error
        }
    }
}

unsafe extern "C" fn post_recv(
    qp: *mut Qp,
    mut receive: *mut RecvWr,
    bad: *mut *mut RecvWr,
) -> c_int {
    // SAFETY: the queue pair lives.
    let own = unsafe { &*qp.cast::<ProviderQueuePair>() };
    let mut wire = own.shared.wire();
    let Some(pair) = wire.pairs.get_mut(&own.head.qp_num) else {
        return libc::EINVAL;
    };
    // SAFETY: the caller's chain is valid.
    while let Some(valid) = unsafe { receive.as_ref() } {
        let error = match pair.state {
            abi::QPS_RESET => libc::EINVAL,
            _ if pair.receives.len() >= pair.receives_max => libc::ENOMEM,
            _ => 0,
        };
        if error != 0 {
            // SAFETY: the caller's place is writable.
            unsafe { *bad = receive };
            return error;
        }
        pair.receives.push_back(valid.wr_id);
        receive = valid.next;
    }
    if pair.state == abi::QPS_ERR {
        wire.end(own.head.qp_num);
    }
    0
}

unsafe extern "C" fn poll_cq(cq: *mut Cq, room: c_int, mut into: *mut Wc) -> c_int {
    // SAFETY: the queue lives.
    let own = unsafe { &*cq.cast::<Queue>() };
    own.shared.polled();
    // SAFETY: the device of the queue is open.
    if unsafe { has_fault(own.head.context, DeviceFault::Overreports) } {
        return room + 1;
    }
    let put = |entry| {
        // SAFETY: the caller has room for `room` entries.
        unsafe {
            into.write(entry);
            into = into.add(1);
        }
    };
    own.entries.take(put, usize::try_from(room).unwrap_or(0)) as c_int
}

unsafe extern "C" fn req_notify_cq(cq: *mut Cq, _solicited: c_int) -> c_int {
    // SAFETY: the queue lives.
    unsafe { &*cq.cast::<Queue>() }.entries.armed.store(true, Ordering::Release);
    0
}
