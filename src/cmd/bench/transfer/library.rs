//! An agent of the C library. The bench uses it as the engine of a guest does: only by the
//! functions of `baton.h`.
//!
//! Owns: the agent, its region, and the events of the present request. Thread: the bench's own; the
//! library starts others. Invariants: each pointer is valid during its call only. The agent ends
//! before its region. Not here: the settings of both ways (`side`).
#![allow(unsafe_code)]

use super::case::TransferEnd;
use super::side::{KEY, PATIENCE, PAYLOAD, SESSIONS, SLOTS, copy_lanes};
use super::talk::BenchRow;
use super::way::{DestinationEnd, SourceEnd};
use crate::abi::{
    BatonConfig, BatonEvent, BatonEventKind, BatonLayout, BatonLogLevel, BatonRole, ELEMENT_BF16,
    ELEMENT_F16, ELEMENT_F32, KIND_BYTES, PAYLOAD_BYTES, baton_address, baton_agent_free,
    baton_agent_new, baton_cause_name, baton_compute, baton_last_error, baton_lease, baton_log,
    baton_offer, baton_poll, baton_region_base, baton_region_free, baton_region_new, baton_release,
    baton_send_last, baton_wait, baton_wish,
};
use crate::ids::PageId;
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::region::Region;
use crate::sys::affinity;
use crate::sys::clock::monotonic_ns;
use std::ffi::{CStr, CString, c_char};
use std::net::{IpAddr, SocketAddr};
use std::ptr::{self, NonNull};
use std::time::Instant;

/// Time limit of a request.
const WITHIN_MS: u32 = 2 * PATIENCE.as_millis() as u32;
/// Events of a request.
const EVENTS: usize = 3;
const NO_EVENT: BatonEvent =
    BatonEvent { request: 0, room: 0, kind: 0, cause: 0, payload: [0; PAYLOAD_BYTES], padding: 0 };

/// An agent of the library and its present request.
pub struct LibraryAgent {
    // Dropped before its memory.
    agent: AgentHandle,
    memory: LibraryMemory,
    /// The address of the source, at a destination.
    source: Option<CString>,
    request: u64,
    tokens: u32,
    /// The kinds of events that have come for the request, a bit each.
    seen: u32,
}

struct AgentHandle(u64);

impl Drop for AgentHandle {
    fn drop(&mut self) {
        baton_agent_free(self.0);
    }
}

/// A region of the library.
struct LibraryMemory {
    /// The same bytes, for the checks of the bench. Dropped first.
    view: Region,
    region: RegionHandle,
}

struct RegionHandle(u64);

impl Drop for RegionHandle {
    fn drop(&mut self) {
        baton_region_free(self.0);
    }
}

/// The result of a call, or the text of its error.
fn checked(result: i32) -> Result<usize, String> {
    let why = || {
        text(|out, bytes| {
            // SAFETY: the buffer has room for `bytes` bytes.
            unsafe { baton_last_error(out, bytes) };
        })
    };
    usize::try_from(result).map_err(|_| format!("the library: {}", why()))
}

/// A text that the library writes.
fn text(write: impl FnOnce(*mut c_char, usize)) -> String {
    let mut bytes = [0u8; 256];
    write(bytes.as_mut_ptr().cast(), bytes.len());
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}

fn c_text(value: impl ToString) -> Result<CString, String> {
    CString::new(value.to_string()).map_err(|why| why.to_string())
}

fn c_layout(row: &BenchRow, layout: &KvLayout) -> BatonLayout {
    BatonLayout {
        pages: row.case.pool,
        page_size: layout.page_size,
        layers: layout.layers,
        kv_heads: layout.kv_heads,
        head_dim: layout.head_dim,
        element: match layout.dtype {
            KvDtype::F32 => ELEMENT_F32,
            KvDtype::F16 => ELEMENT_F16,
            KvDtype::Bf16 => ELEMENT_BF16,
        },
        ranks: layout.ranks,
        model_kv_heads: layout.model_kv_heads,
        page_stride: layout.page_stride,
        layer_stride: layout.layer_stride,
        kv_stride: layout.kv_stride,
        head_stride: layout.head_stride,
        token_stride: layout.token_stride,
        rank_stride: layout.rank_stride,
    }
}

impl LibraryMemory {
    fn new(bytes: u64) -> Result<LibraryMemory, String> {
        let (mut region, mut base, mut len) = (0, ptr::null_mut(), 0);
        // SAFETY: the result is writable.
        checked(unsafe { baton_region_new(bytes as usize, &mut region) })?;
        let region = RegionHandle(region);
        // SAFETY: both results are writable.
        checked(unsafe { baton_region_base(region.0, &mut base, &mut len) })?;
        let base = NonNull::new(base.cast()).ok_or("a region without memory")?;
        // SAFETY: the bytes stay mapped until the region is freed, after the view. All access of
        // the bench is by atomics, between hand-offs.
        let view = unsafe { Region::adopt(base, len, false) }.map_err(|why| why.to_string())?;
        Ok(LibraryMemory { view, region })
    }
}

impl LibraryAgent {
    /// Starts the agent of one side of a row. A destination connects to `source`.
    pub fn new(
        row: &BenchRow,
        end: TransferEnd,
        host: IpAddr,
        source: Option<SocketAddr>,
    ) -> Result<LibraryAgent, String> {
        // SAFETY: there is no callback.
        checked(unsafe { baton_log(None, ptr::null_mut(), BatonLogLevel::Error as u32) })?;
        let layout = row.layout(end).ok_or("ranks that do not share the heads")?;
        let memory = LibraryMemory::new(u64::from(layout.ranks) * layout.rank_stride)?;
        let (host, transports) = (c_text(host)?, c_text(&row.transport)?);
        let allow = source.map(|source| c_text(source.ip())).transpose()?;
        let source = source.map(c_text).transpose()?;
        // The threads of the other way inherit the CPUs of this thread.
        let cpus = affinity::allowed().map_err(|why| why.to_string())?;
        let cpus: Vec<u32> = cpus.into_iter().map(|cpu| cpu as u32).collect();
        let role = match end {
            TransferEnd::Source => BatonRole::Source,
            TransferEnd::Destination => BatonRole::Destination,
        };
        let config = BatonConfig {
            size: size_of::<BatonConfig>() as u32,
            role: role as u32,
            region: memory.region.0,
            layout: c_layout(row, &layout),
            kind: [0; KIND_BYTES],
            host: host.as_ptr(),
            allow: allow.as_ref().map_or(ptr::null(), |allow| allow.as_ptr()),
            transports: transports.as_ptr(),
            devices: ptr::null(),
            key: KEY.as_ptr(),
            key_bytes: KEY.len(),
            cpus: cpus.as_ptr(),
            cpus_len: cpus.len(),
            slots: SLOTS as u32,
            prompt_pages: row.case.pages,
            sessions: SESSIONS as u32,
            lanes: row.lanes.into(),
            copy_threads: copy_lanes(row, end) as u32,
        };
        let mut agent = 0;
        // SAFETY: the configuration and all that it points to live until the end of this function.
        checked(unsafe { baton_agent_new(&config, &mut agent) })?;
        let agent = AgentHandle(agent);
        Ok(LibraryAgent { agent, memory, source, request: 0, tokens: 0, seen: 0 })
    }

    /// The address for destinations, at a source.
    pub fn address(&self) -> Result<SocketAddr, String> {
        let mut result = 0;
        let address = text(|out, bytes| {
            // SAFETY: the buffer has room for `bytes` bytes.
            result = unsafe { baton_address(self.agent.0, out, bytes) };
        });
        checked(result)?;
        address.parse().map_err(|_| format!("the library has the address {address:?}"))
    }

    /// The memory of the KV.
    pub fn region(&self) -> &Region {
        &self.memory.view
    }

    fn begin(&mut self, request: u64, ids: &[u32]) {
        (self.request, self.tokens, self.seen) = (request, ids.len() as u32, 0);
    }

    fn lease_pages(&mut self, pages: &[PageId]) -> Result<(), String> {
        let (agent, pages) = (self.agent.0, bytemuck::cast_slice::<PageId, u32>(pages));
        // SAFETY: the pages are readable.
        let leased = unsafe { baton_lease(agent, self.request, 0, pages.as_ptr(), pages.len()) };
        checked(leased).map(drop)
    }

    /// Waits for an event of the request.
    fn wait_for(&mut self, kind: BatonEventKind) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        while self.seen & bit(kind as u32) == 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("{kind:?}: not within {} s", PATIENCE.as_secs()));
            }
            checked(baton_wait(self.agent.0, left.as_micros() as u64))?;
            self.take_events()?;
        }
        Ok(())
    }

    fn take_events(&mut self) -> Result<(), String> {
        let mut events = [NO_EVENT; EVENTS];
        // SAFETY: there is room for so many events.
        let polled = unsafe { baton_poll(self.agent.0, events.as_mut_ptr(), events.len()) };
        let events = &events[..checked(polled)?];
        for event in events.iter().filter(|event| event.request == self.request) {
            if event.kind == BatonEventKind::Failed as u32 {
                let cause = text(|out, bytes| {
                    // SAFETY: the buffer has room for `bytes` bytes.
                    unsafe { baton_cause_name(event.cause, out, bytes) };
                });
                return Err(format!("the hand-off failed: {cause}"));
            }
            self.seen |= bit(event.kind);
        }
        Ok(())
    }

    fn leave(&mut self) -> Result<(), String> {
        self.wait_for(BatonEventKind::Landed)?;
        self.wait_for(BatonEventKind::Ended)?;
        checked(baton_release(self.agent.0, self.request)).map(drop)
    }
}

/// The bit of a kind of event. An unknown kind has none.
fn bit(kind: u32) -> u32 {
    1u32.checked_shl(kind).unwrap_or(0)
}

impl SourceEnd for LibraryAgent {
    fn offer(&mut self, room: u64, ids: &[u32]) -> Result<(), String> {
        let mut request = 0;
        let agent = self.agent.0;
        // SAFETY: the ids are readable, and the result is writable.
        checked(unsafe {
            baton_offer(agent, room, ids.as_ptr(), ids.len(), WITHIN_MS, &mut request)
        })?;
        self.begin(request, ids);
        Ok(())
    }

    fn meet(&mut self, pages: &[PageId]) -> Result<(), String> {
        self.wait_for(BatonEventKind::Met)?;
        self.lease_pages(pages)
    }

    /// The payload comes first, so that all tokens leave in one chunk, as with an agent.
    fn send(&mut self) -> Result<(), String> {
        let agent = self.agent.0;
        // SAFETY: the payload is readable.
        let sent = unsafe { baton_send_last(agent, self.request, PAYLOAD.as_ptr(), PAYLOAD.len()) };
        checked(sent)?;
        checked(baton_compute(agent, self.request, self.tokens)).map(drop)
    }

    fn end(&mut self) -> Result<(), String> {
        self.leave()
    }
}

impl DestinationEnd for LibraryAgent {
    fn wish(&mut self, room: u64, ids: &[u32]) -> Result<(), String> {
        let source = self.source.as_ref().ok_or("a destination without a source")?;
        let (agent, mut request) = (self.agent.0, 0);
        // SAFETY: the text ends with a zero, the ids are readable, and the result is writable.
        checked(unsafe {
            let (source, ids) = (source.as_ptr(), (ids.as_ptr(), ids.len()));
            baton_wish(agent, room, source, ids.0, ids.1, WITHIN_MS, &mut request)
        })?;
        self.begin(request, ids);
        Ok(())
    }

    fn lease(&mut self, pages: &[PageId]) -> Result<(), String> {
        self.lease_pages(pages)
    }

    fn land(&mut self) -> Result<u64, String> {
        self.wait_for(BatonEventKind::Landed)?;
        Ok(monotonic_ns())
    }

    fn end(&mut self) -> Result<(), String> {
        self.leave()
    }
}
