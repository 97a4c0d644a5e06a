//! The objects behind handles: regions of KV memory, and agents.

use super::guard::Failure;
use super::handles::HandleTable;
use super::types::{
    BatonCounters, BatonError, BatonEvent, BatonEventKind, BatonLayout, BatonRole, ELEMENT_BF16,
    ELEMENT_F16, ELEMENT_F32, KIND_BYTES, PAYLOAD_BYTES,
};
use crate::agent::AgentConfig;
use crate::agent::client::{AgentClient, AgentCounts};
use crate::agent::requests::{AgentEvent, AgentEventKind};
use crate::agent::thread::AgentThread;
use crate::ids::{Generation, Role, SlotId};
use crate::kv::layout::{KvDtype, KvLayout};
use crate::kv::region::Region;
use crate::limits::{ABI_LISTED_PAGES_MAX, ABI_SLOTS_MAX, LANES_MAX, SESSIONS_MAX};
use crate::stdx::cidr::Cidr;
use crate::stdx::failpoint::is_failpoint_active;
use crate::stdx::sync::AtomicU64;
use crate::sys::affinity::CPUS_MAX;
use crate::transfer::manager::identity::layout_of_claim;
use crate::transfer::manager::rooms::Slot;
use crate::transfer::transport::rdma::Nic;
use crate::wire::auth::{ClusterKey, Keyring};
use crate::wire::message::{KvLayoutClaim, Transport};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// All regions of the process.
pub(super) static REGIONS: HandleTable<Region> = HandleTable::new();
/// All agents of the process.
pub(super) static AGENTS: HandleTable<AgentEntry> = HandleTable::new();

/// An agent and what its calls need.
#[derive(Debug)]
pub(super) struct AgentEntry {
    pub(super) client: Arc<AgentClient>,
    pub(super) address: Option<SocketAddr>,
    thread: Mutex<Option<AgentThread>>,
    /// The status words, after a caller has asked for them.
    status: OnceLock<&'static [AtomicU64]>,
}

impl AgentEntry {
    /// The status words. They stay until the process ends, because a caller keeps the pointer.
    pub(super) fn status_words(&self) -> &'static [AtomicU64] {
        let leak = || Box::leak(Box::new(Arc::clone(self.client.status_table()))).words();
        self.status.get_or_init(leak)
    }

    /// Ends the agent. When it returns, no transfer uses the region.
    pub(super) fn end(&self) {
        drop(self.thread.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// What a caller asks of a new agent, without pointers. A number that is 0 means the default.
#[derive(Debug)]
pub(super) struct AgentSettings<'a> {
    pub(super) role: u32,
    pub(super) region: u64,
    pub(super) layout: BatonLayout,
    pub(super) kind: [u8; KIND_BYTES],
    pub(super) host: Option<&'a str>,
    pub(super) allow: Option<&'a str>,
    pub(super) transports: Option<&'a str>,
    pub(super) devices: Option<&'a str>,
    pub(super) key: &'a [u8],
    pub(super) cpus: &'a [u32],
    pub(super) slots: u32,
    pub(super) prompt_pages: u32,
    pub(super) sessions: u32,
    pub(super) lanes: u32,
    pub(super) copy_threads: u32,
}

/// Checks the settings and starts an agent.
///
/// # Errors
/// A value is out of range, or a thread, a port or a NIC cannot be had.
pub(super) fn start_agent(settings: &AgentSettings<'_>) -> Result<u64, Failure> {
    let role = match settings.role {
        role if role == BatonRole::Source as u32 => Role::Prefill,
        role if role == BatonRole::Destination as u32 => Role::Decode,
        other => return Err(Failure::argument(format!("role {other} is neither 1 nor 2"))),
    };
    let region = REGIONS.get(settings.region)?;
    let config = config_of(settings, region)?;
    let thread = AgentThread::start(role, config);
    let thread = thread.map_err(|why| Failure::new(BatonError::System, why))?;
    let entry = AgentEntry {
        client: Arc::clone(thread.client()),
        address: thread.address(),
        thread: Mutex::new(Some(thread)),
        status: OnceLock::new(),
    };
    Ok(AGENTS.add(entry)?)
}

fn config_of(settings: &AgentSettings<'_>, region: Arc<Region>) -> Result<AgentConfig, Failure> {
    let layout = layout_of(&settings.layout, region.len() as u64)?;
    let (pages, host) = (settings.layout.pages, host_of(settings)?);
    let keys = match settings.key {
        [] => Keyring::default(),
        key => {
            Keyring::new([ClusterKey::new(key).map_err(|why| Failure::argument(why.to_string()))?])
        }
    };
    let default = AgentConfig::new(region, layout, pages, settings.kind, host);
    let transports = listed("transports", settings.transports, transport_of)?;
    let transports = transports.unwrap_or_else(|| default.transports.clone());
    let allowed = listed("allow", settings.allow, |name| name.parse().ok())?;
    let allowed = allowed.unwrap_or_else(|| default.allowed.clone());
    let is_local = host.is_loopback() && allowed.iter().all(is_loopback);
    if settings.key.is_empty() && !is_local {
        return Err(Failure::argument(
            "without a key, host and allow must be loopback addresses, because peers prove nothing",
        ));
    }
    let nics = if transports.contains(&Transport::Rdma) {
        let devices = listed("devices", settings.devices, |name| Some(name.to_string()))?;
        Nic::choose(&devices.unwrap_or_default(), &[])
            .map_err(|why| Failure::new(BatonError::System, why))?
    } else {
        Vec::new()
    };
    let cpus = match settings.cpus {
        // The kernel leaves those of the process's cpuset.
        [] => (0..CPUS_MAX).collect(),
        cpus => cpus.iter().map(|&cpu| cpu as usize).collect(),
    };
    let slots = number("slots", settings.slots, default.slots, 1..=ABI_SLOTS_MAX)?;
    let sessions = number("sessions", settings.sessions, default.sessions, 1..=SESSIONS_MAX)?;
    let lanes = number("lanes", settings.lanes, default.lanes.into(), 1..=LANES_MAX)?;
    let copies = settings.copy_threads;
    let copy_threads = number("copy_threads", copies, default.copy_threads, 1..=LANES_MAX)?;
    let prompt = 1..=pages as usize;
    let prompt_pages = number("prompt_pages", settings.prompt_pages, pages as usize, prompt)?;
    if slots * prompt_pages > ABI_LISTED_PAGES_MAX {
        return Err(Failure::argument(format!(
            "{slots} slots with prompt_pages {prompt_pages} list more than {ABI_LISTED_PAGES_MAX} \
             pages"
        )));
    }
    Ok(AgentConfig {
        slots,
        prompt_pages,
        sessions,
        transports,
        lanes: lanes as u16,
        copy_threads,
        nics,
        allowed,
        keys,
        cpus,
        ..default
    })
}

fn host_of(settings: &AgentSettings<'_>) -> Result<IpAddr, Failure> {
    let host = settings.host.map(str::parse::<IpAddr>).transpose();
    let host = host.map_err(|_| Failure::argument("host is no IP address"))?;
    let host = host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
    // Destinations get this address. With 0.0.0.0, they would connect to themselves.
    if host.is_unspecified() && settings.role == BatonRole::Source as u32 {
        return Err(Failure::argument(format!(
            "a source cannot have the host {host}: its destinations get this address"
        )));
    }
    Ok(host)
}

fn transport_of(name: &str) -> Option<Transport> {
    Transport::named(name).filter(|transport| *transport != Transport::Fake)
}

/// The values of a list of names that are separated by commas, or none without a list.
fn listed<T>(
    setting: &str,
    list: Option<&str>,
    value_of: impl Fn(&str) -> Option<T>,
) -> Result<Option<Vec<T>>, Failure> {
    let Some(list) = list else { return Ok(None) };
    let names: Vec<&str> = list.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
    if names.is_empty() {
        return Err(Failure::argument(format!("{setting} names nothing; null means the default")));
    }
    let mut values = Vec::new();
    for (index, name) in names.iter().enumerate() {
        if names[..index].contains(name) {
            return Err(Failure::argument(format!("{setting} names {name} twice")));
        }
        let unknown = || Failure::argument(format!("{setting}: {name} is not possible"));
        values.push(value_of(name).ok_or_else(unknown)?);
    }
    Ok(Some(values))
}

fn is_loopback(network: &Cidr) -> bool {
    Cidr::LOOPBACK.iter().any(|loopback| loopback.covers(network))
}

fn number(
    name: &str,
    value: u32,
    default: usize,
    range: RangeInclusive<usize>,
) -> Result<usize, Failure> {
    match value as usize {
        0 => Ok(default),
        value if range.contains(&value) => Ok(value),
        value => {
            let (from, to) = range.into_inner();
            Err(Failure::argument(format!("{name} is {value}, not {from} to {to}")))
        }
    }
}

fn layout_of(asked: &BatonLayout, bytes: u64) -> Result<KvLayout, Failure> {
    let dtype = match asked.element {
        ELEMENT_F32 => KvDtype::F32,
        ELEMENT_F16 => KvDtype::F16,
        ELEMENT_BF16 => KvDtype::Bf16,
        other => return Err(Failure::argument(format!("there is no element type {other}"))),
    };
    // The check of a layout that a peer announces.
    let claim = KvLayoutClaim {
        page_size: asked.page_size,
        layers: asked.layers,
        kv_heads: asked.kv_heads,
        head_dim: asked.head_dim,
        pages: asked.pages,
        dtype: dtype as u32,
        page_stride: asked.page_stride,
        layer_stride: asked.layer_stride,
        kv_stride: asked.kv_stride,
        head_stride: asked.head_stride,
        token_stride: asked.token_stride,
        rank_stride: asked.rank_stride,
        ranks: asked.ranks.max(1),
        model_kv_heads: if asked.model_kv_heads == 0 {
            asked.kv_heads
        } else {
            asked.model_kv_heads
        },
    };
    let claim = claim.checked().map_err(|why| Failure::argument(format!("layout: {why}")))?;
    // Pages that overlap have no end.
    let has_room = |layout: &KvLayout| {
        let [pages, ranks] = [asked.pages, layout.ranks].map(u128::from);
        (pages * ranks).saturating_mul(page_bytes(asked, dtype)) <= bytes.into()
    };
    layout_of_claim(&claim, bytes).filter(has_room).ok_or_else(|| {
        Failure::argument(format!(
            "layout: it exceeds the {bytes} bytes of the region, or the ranks do not share the KV \
             heads of the model"
        ))
    })
}

/// Bytes of KV in one page of a rank. The counts are those of a caller, so 64 bits may not hold it.
fn page_bytes(asked: &BatonLayout, dtype: KvDtype) -> u128 {
    let counts = [asked.page_size, asked.layers, asked.kv_heads, asked.head_dim];
    let elements = counts.into_iter().map(u128::from).fold(1, u128::saturating_mul);
    elements.saturating_mul(2 * u128::from(dtype.bytes()))
}

/// The number of a request: its slot and the slot's generation.
pub(super) fn request_of(slot: Slot) -> u64 {
    if is_failpoint_active("request has the number of a former one in its slot") {
        return slot.id.0.into();
    }
    u64::from(slot.generation.0) << 32 | u64::from(slot.id.0)
}

/// The slot of a request's number. An unknown number is the slot of no request.
pub(super) fn slot_of(request: u64) -> Slot {
    Slot { id: SlotId(request as u32), generation: Generation((request >> 32) as u32) }
}

/// The event as C sees it.
pub(super) fn event_of(event: &AgentEvent) -> BatonEvent {
    let mut out = BatonEvent {
        request: request_of(event.slot),
        room: event.room.0,
        kind: 0,
        cause: 0,
        payload: [0; PAYLOAD_BYTES],
        padding: 0,
    };
    let kind = match &event.kind {
        AgentEventKind::Met => BatonEventKind::Met,
        AgentEventKind::Landed(payload) => {
            payload.iter().for_each(|payload| out.payload = *payload);
            BatonEventKind::Landed
        }
        AgentEventKind::Failed(_) if is_failpoint_active("failure is said to be the end") => {
            BatonEventKind::Ended
        }
        AgentEventKind::Failed(_) if is_failpoint_active("failure has no cause") => {
            BatonEventKind::Failed
        }
        AgentEventKind::Failed(cause) => {
            out.cause = *cause as u32;
            BatonEventKind::Failed
        }
        AgentEventKind::Ended => BatonEventKind::Ended,
    };
    out.kind = kind as u32;
    out
}

/// The counters as C sees them.
pub(super) fn counters_of(counts: &AgentCounts) -> BatonCounters {
    BatonCounters {
        size: size_of::<BatonCounters>() as u32,
        open: counts.open,
        landed: counts.landed,
        failed: counts.failed,
        work_requests: counts.transfer.work_requests,
        doorbells: counts.transfer.doorbells,
    }
}
