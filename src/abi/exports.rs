//! The functions of the C ABI. Each one checks pointers and lengths, and calls safe code.
//!
//! Thread: any. Invariants: a pointer from the caller is used during the call only. The status
//! words are the one thing that a caller keeps. A call checks all arguments before it has an
//! effect. Not here: how pointers are checked (`pointers`).
#![allow(unsafe_code)]

use super::guard::{Failure, call, with_last_error};
use super::log_thread;
use super::objects::{
    AGENTS, AgentSettings, REGIONS, counters_of, event_of, request_of, slot_of, start_agent,
};
use super::pointers::{check, check_size, items, store, text, write_text};
use super::types::{
    ABI, BatonConfig, BatonCounters, BatonError, BatonEvent, BatonLogCallback, BatonLogLevel,
    PAYLOAD_BYTES,
};
use crate::cause::Cause;
use crate::ids::{PageId, Room};
use crate::kv::region::Region;
use crate::limits::{ABI_WAIT_MAX, CLUSTER_KEY_MAX, CONTEXT_MAX};
use crate::obs::log::LogLevel;
use crate::stdx::sync::AtomicU64;
use crate::sys::affinity::CPUS_MAX;
use std::ffi::{c_char, c_void};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::{self, NonNull};
use std::time::Duration;

/// The version of the interface: `BATON_ABI` of the header that the library was built with.
#[unsafe(no_mangle)]
pub extern "C" fn baton_abi() -> u32 {
    ABI
}

/// The name of an error, "unknown", or "none" for a result that is no error. The text is valid for
/// ever.
#[unsafe(no_mangle)]
pub extern "C" fn baton_error_name(error: i32) -> *const c_char {
    let known = BatonError::ALL.into_iter().find(|known| *known as i32 == error);
    let other = if error < 0 { c"unknown" } else { c"none" };
    known.map_or(other, BatonError::name).as_ptr()
}

/// Writes the text of this thread's last error, with a final zero. Returns the bytes of the whole
/// text without the zero: a text of more than `bytes - 1` bytes is cut.
///
/// # Safety
/// `out` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_last_error(out: *mut c_char, bytes: usize) -> usize {
    // SAFETY: the caller's promise is that of `write_text`.
    with_last_error(|text| unsafe { write_text(text, out, bytes) })
}

/// Writes the name of a cause, as `baton_last_error` writes its text.
///
/// # Safety
/// `out` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_cause_name(cause: u32, out: *mut c_char, bytes: usize) -> usize {
    let name = u8::try_from(cause).map_or(Cause::Internal, Cause::from_number).name();
    // SAFETY: the caller's promise is that of `write_text`.
    unsafe { write_text(name, out, bytes) }
}

/// Sends log lines of `level` and more severe ones to `callback`, or to standard error if it is
/// null. It is for the whole process. Before the first call, warnings go to standard error. A
/// thread of its own calls `callback`. If the callback is slow, lines are left out, and one line
/// says how many. It must not throw an exception. It can call every function except this one.
///
/// The former callback still gets the lines that wait, for a second at most. This call waits until
/// it has returned, and it is not called any more. Before the end of the program, a call with null
/// gets the last lines.
///
/// # Safety
/// `callback` can be called with `data` by any thread until it is replaced.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_log(
    callback: BatonLogCallback,
    data: *mut c_void,
    level: u32,
) -> i32 {
    call(|| {
        let level = match level {
            level if level == BatonLogLevel::Error as u32 => LogLevel::Error,
            level if level == BatonLogLevel::Warn as u32 => LogLevel::Warn,
            level if level == BatonLogLevel::Info as u32 => LogLevel::Info,
            level if level == BatonLogLevel::Debug as u32 => LogLevel::Debug,
            other => return Err(Failure::argument(format!("there is no log level {other}"))),
        };
        let data = CallbackData(data);
        let callback = callback.map(|callback| -> log_thread::Callback {
            Box::new(move |level, line| {
                let data = &data;
                // SAFETY: the caller of `baton_log` promised that any thread can call it.
                unsafe { callback(level as u32, line.as_ptr(), data.0) };
            })
        });
        log_thread::set(callback, level)?;
        Ok(0)
    })
}

struct CallbackData(*mut c_void);
// SAFETY: the pointer is only handed to the callback, which any thread can call.
unsafe impl Send for CallbackData {}

/// Allocates a region of zeroed memory that peers on this host can map read-only. Its length is
/// `bytes`, rounded up to whole memory pages.
///
/// # Safety
/// `region` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_region_new(bytes: usize, region: *mut u64) -> i32 {
    call(|| {
        check(region, "region")?;
        let made = Region::new(c"baton-kv", bytes);
        let made =
            made.map_err(|error| Failure::new(BatonError::System, format!("memory: {error}")))?;
        // SAFETY: the caller's promise.
        unsafe { store(region, "region", REGIONS.add(made)?) }
    })
}

/// Makes a region of memory that the caller has allocated. With `remap` 1, its whole memory pages
/// move onto a memory file, in place and with their content: peers on this host can then map them.
/// A source with shm needs that. With `remap` 0, the memory stays as it is. Address and length are
/// multiples of 8. No other adopted region has any of the bytes: several agents can use one region.
/// Remapped memory is private, anonymous and writable, as that of malloc.
///
/// After `baton_region_free`, the memory is private again. Both moves copy the memory pages that
/// are not zero: the process needs as much free memory as they have. Locks, huge pages and NUMA
/// nodes that were chosen for the memory are lost.
///
/// # Safety
/// The bytes stay readable and writable until the region is freed. No thread writes remapped memory
/// during this call and during `baton_region_free`. No device has its pages then: not CUDA
/// (`cudaHostRegister`), not a NIC (`ibv_reg_mr`), not io_uring. A device would go on with the
/// former pages. A process that is forked meanwhile shares remapped memory with its parent.
/// `region` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_region_adopt(
    base: *mut c_void,
    bytes: usize,
    remap: u32,
    region: *mut u64,
) -> i32 {
    call(|| {
        check(region, "region")?;
        let base = NonNull::new(base.cast::<u8>());
        let base = base.ok_or_else(|| Failure::argument("base is null"))?;
        if remap > 1 {
            return Err(Failure::argument("remap is neither 0 nor 1"));
        }
        // SAFETY: the caller's promise.
        let adopted = unsafe { Region::adopt(base, bytes, remap == 1) };
        let adopted = adopted.map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => Failure::argument(error.to_string()),
            _ => Failure::new(BatonError::System, format!("memory: {error}")),
        })?;
        // SAFETY: the caller's promise.
        unsafe { store(region, "region", REGIONS.add(adopted)?) }
    })
}

/// The first byte and the length of a region. It stays mapped until it is freed.
///
/// # Safety
/// `base` and `bytes` are writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_region_base(
    region: u64,
    base: *mut *mut c_void,
    bytes: *mut usize,
) -> i32 {
    call(|| {
        let region = REGIONS.get(region)?;
        check(bytes, "bytes")?;
        // SAFETY: the caller's promise.
        unsafe {
            store(base, "base", region.base().as_ptr().cast())?;
            store(bytes, "bytes", region.len())
        }
    })
}

/// Frees a region that no agent uses. If adopted memory cannot be made private again, the error is
/// `System`: the region stays as it is, and the call can be repeated. If `baton-ctl` or `move-0` of
/// an agent has panicked, its region stays mapped, and the error is `Busy`.
#[unsafe(no_mangle)]
pub extern "C" fn baton_region_free(region: u64) -> i32 {
    call(|| {
        let make_private = |region: &mut Region| {
            let made = region.make_private();
            made.map_err(|error| Failure::new(BatonError::System, format!("memory: {error}")))
        };
        REGIONS.end_unused(region, make_private)?;
        Ok(0)
    })
}

/// Starts an agent with threads of its own.
///
/// # Safety
/// As many bytes of `config` as its `size` says are readable, and its pointers are readable. Its
/// texts end with a zero. `agent` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_agent_new(config: *const BatonConfig, agent: *mut u64) -> i32 {
    call(|| {
        check(agent, "agent")?;
        // SAFETY: the caller's promise. The whole structure is readable after the check.
        let config = unsafe {
            check_size(config, "config")?;
            &*config
        };
        // SAFETY: the caller's promise holds for each pointer.
        let settings = unsafe {
            AgentSettings {
                role: config.role,
                region: config.region,
                layout: config.layout,
                kind: config.kind,
                host: text(config.host, "host")?,
                allow: text(config.allow, "allow")?,
                transports: text(config.transports, "transports")?,
                devices: text(config.devices, "devices")?,
                key: items(config.key, config.key_bytes, CLUSTER_KEY_MAX, "key")?,
                cpus: items(config.cpus, config.cpus_len, CPUS_MAX, "cpus")?,
                slots: config.slots,
                prompt_pages: config.prompt_pages,
                sessions: config.sessions,
                lanes: config.lanes,
                copy_threads: config.copy_threads,
            }
        };
        let started = start_agent(&settings)?;
        // SAFETY: the caller's promise.
        unsafe { store(agent, "agent", started) }
    })
}

/// Ends an agent. It waits for its last messages, at most for a second, and for a copy that one of
/// its threads makes. After the call, nothing of it reads or writes the region, and a copy that a
/// peer is still making is void. Requests that have not ended get no more events.
#[unsafe(no_mangle)]
pub extern "C" fn baton_agent_free(agent: u64) -> i32 {
    call(|| {
        AGENTS.remove(agent)?.end();
        Ok(0)
    })
}

/// Writes the address of a source for its destinations, as `baton_last_error` writes its text.
/// Returns the bytes of the whole text.
///
/// # Safety
/// `out` has room for `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_address(agent: u64, out: *mut c_char, bytes: usize) -> i32 {
    call(|| {
        let address = AGENTS.get(agent)?.address.ok_or(BatonError::Role)?.to_string();
        // SAFETY: the caller's promise is that of `write_text`.
        Ok(unsafe { write_text(&address, out, bytes) } as i32)
    })
}

/// The status words of an agent, one for each slot; the slot is the low half of a request's number.
/// A word is, from its highest bit: 24 bits generation, 3 bits state, 5 bits cause, 32 bits lanes.
/// The states are 0 failed, 1 bootstrapping, 2 waiting for input, 3 transferring, 4 success. Read
/// them with acquire order. They stay mapped until the process ends. Null: the call failed.
///
/// A word belongs to a request if its generation is the high half of the request's number. After
/// the release, the word soon has the generation of a request that does not exist yet, and the
/// state bootstrapping.
///
/// # Safety
/// `slots` is writable, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_status(agent: u64, slots: *mut u32) -> *const u64 {
    let mut words: *const u64 = ptr::null();
    call(|| {
        let entry = AGENTS.get(agent)?;
        let table = entry.status_words();
        if !slots.is_null() {
            // SAFETY: the caller's promise.
            unsafe { store(slots, "slots", table.len() as u32)? };
        }
        words = table.as_ptr().cast::<AtomicU64>().cast();
        Ok(0)
    });
    words
}

/// A descriptor that is readable while there are events. It belongs to the agent: do not close it.
/// Remove it from epoll sets before `baton_agent_free`, because the number can be used again.
#[unsafe(no_mangle)]
pub extern "C" fn baton_event_fd(agent: u64) -> i32 {
    call(|| Ok(AGENTS.get(agent)?.client.event_fd().as_fd().as_raw_fd()))
}

/// Offers the KV of a prompt in `room`, at a source. The request fails after `within_ms`, at most
/// half an hour. There is no default: it fails at once if `within_ms` is 0.
///
/// # Safety
/// `ids` has `len` token ids. `request` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_offer(
    agent: u64,
    room: u64,
    ids: *const u32,
    len: usize,
    within_ms: u32,
    request: *mut u64,
) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        // SAFETY: the caller's promise.
        let ids = unsafe { items(ids, len, CONTEXT_MAX as usize, "ids")? };
        check(request, "request")?;
        let within = Duration::from_millis(within_ms.into());
        let slot = entry.client.offer(room_of(room)?, ids, within).map_err(BatonError::from)?;
        // SAFETY: the caller's promise.
        unsafe { store(request, "request", request_of(slot)) }
    })
}

/// Asks for the KV of a prompt in `room`, at a destination. `source` is the address of the source's
/// agent, or the control port of a Baton prefill worker. The request fails after `within_ms`, as
/// with `baton_offer`.
///
/// # Safety
/// `source` ends with a zero, `ids` has `len` token ids. `request` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_wish(
    agent: u64,
    room: u64,
    source: *const c_char,
    ids: *const u32,
    len: usize,
    within_ms: u32,
    request: *mut u64,
) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        // SAFETY: the caller's promise.
        let ids = unsafe { items(ids, len, CONTEXT_MAX as usize, "ids")? };
        // SAFETY: as above.
        let source = unsafe { text(source, "source")? };
        let source = source.ok_or_else(|| Failure::argument("source is null"))?;
        let source = source.parse();
        let source = source.map_err(|_| Failure::argument("source is no address and port"))?;
        check(request, "request")?;
        let within = Duration::from_millis(within_ms.into());
        let wished = entry.client.wish(room_of(room)?, source, ids, within);
        let slot = wished.map_err(BatonError::from)?;
        // SAFETY: the caller's promise.
        unsafe { store(request, "request", request_of(slot)) }
    })
}

/// Leases pages of the prompt to the transfer, until its event `Ended`. A source can lease its
/// pages in several calls, in the order of the tokens; `prefix` is 0. A destination leases the
/// pages of the whole prompt in one call. It already has the KV of the first `prefix` tokens, which
/// fill whole pages. Calls for one request come one after the other.
///
/// # Safety
/// `pages` has `len` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_lease(
    agent: u64,
    request: u64,
    prefix: u32,
    pages: *const u32,
    len: usize,
) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        // SAFETY: the caller's promise.
        let pages = unsafe { items(pages, len, CONTEXT_MAX as usize, "pages")? };
        let pages = bytemuck::cast_slice::<u32, PageId>(pages);
        entry.client.lease(slot_of(request), prefix, pages).map_err(BatonError::from)?;
        Ok(0)
    })
}

/// The KV of the first `tokens` tokens is computed, at a source. Their pages are leased.
#[unsafe(no_mangle)]
pub extern "C" fn baton_compute(agent: u64, request: u64, tokens: u32) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        entry.client.compute(slot_of(request), tokens).map_err(BatonError::from)?;
        Ok(0)
    })
}

/// Sends up to `BATON_PAYLOAD_BYTES` bytes with the last tokens, at a source. The last tokens leave
/// after this call. The destination gets the bytes with its event `Landed`, filled up with zeros.
///
/// # Safety
/// `payload` has `bytes` bytes; it can be null if they are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_send_last(
    agent: u64,
    request: u64,
    payload: *const u8,
    bytes: usize,
) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        // SAFETY: the caller's promise.
        let given = unsafe { items(payload, bytes, PAYLOAD_BYTES, "payload")? };
        let mut payload = [0; PAYLOAD_BYTES];
        payload[..given.len()].copy_from_slice(given);
        entry.client.send_last(slot_of(request), &payload).map_err(BatonError::from)?;
        Ok(0)
    })
}

/// Ends a request, unless it has an outcome. Its events still come. The other end learns it if both
/// have met. A source learns it as soon as the event `Met` has come at the destination. So a
/// destination that needs nothing waits for `Met`, then cancels.
#[unsafe(no_mangle)]
pub extern "C" fn baton_cancel(agent: u64, request: u64) -> i32 {
    call(|| {
        AGENTS.get(agent)?.client.cancel(slot_of(request)).map_err(BatonError::from)?;
        Ok(0)
    })
}

/// Gives the slot of a request back, after its event `Ended` was read.
#[unsafe(no_mangle)]
pub extern "C" fn baton_release(agent: u64, request: u64) -> i32 {
    call(|| {
        AGENTS.get(agent)?.client.release(slot_of(request)).map_err(BatonError::from)?;
        Ok(0)
    })
}

/// Takes up to `len` events. Returns how many; 0 means that there are no more now. Each event is
/// taken once.
///
/// # Safety
/// `events` has room for `len` events.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_poll(agent: u64, events: *mut BatonEvent, len: usize) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        if len > 0 {
            check(events, "events")?;
        }
        let mut taken = 0;
        while taken < len.min(i32::MAX as usize) {
            let Some(event) = entry.client.poll() else { break };
            // SAFETY: the caller's promise.
            unsafe { events.add(taken).write(event_of(&event)) };
            taken += 1;
        }
        if taken == 0 && len > 0 && entry.client.is_dead() {
            return Err(BatonError::Dead.into());
        }
        Ok(taken as i32)
    })
}

/// Waits until there are events, at most for `micros` microseconds and a minute. Returns 1 if there
/// are events or the agent has ended. Returns 0 if the time is over, or earlier if the thread has
/// handled a signal.
#[unsafe(no_mangle)]
pub extern "C" fn baton_wait(agent: u64, micros: u64) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        let time = Duration::from_micros(micros).min(ABI_WAIT_MAX);
        let waited = entry.client.event_fd().wait_readable(time);
        let waited = waited.map_err(|error| Failure::new(BatonError::System, error.to_string()))?;
        Ok(waited.into())
    })
}

/// Writes the counters of an agent. `out->size` is `sizeof(baton_counter_values)`.
///
/// # Safety
/// As many bytes of `out` as its `size` says are readable and writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn baton_counters(agent: u64, out: *mut BatonCounters) -> i32 {
    call(|| {
        let entry = AGENTS.get(agent)?;
        // SAFETY: the caller's promise. The whole structure is writable after the check.
        unsafe {
            check_size(out, "out")?;
            store(out, "out", counters_of(&entry.client.counts()))
        }
    })
}

fn room_of(room: u64) -> Result<Room, Failure> {
    match Room(room) {
        room if room <= Room::MAX => Ok(room),
        _ => Err(Failure::argument("a room has 63 bits")),
    }
}
