//! The calls of the C ABI, in any order and with any arguments. They are made on a source and a
//! destination of this process, and on agents and memory of one input. Each request has one outcome
//! and then one end, no call panics inside, and every request ends after a cancel. A wait for
//! events ends when they come. A wrong call has the error of its mistake. A log callback gets no
//! line after its successor has come.

use crate::memory;
use baton::abi::*;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const PAGES: u32 = 16;
const PAGE_SIZE: u32 = 4;
const ELEMENT_BYTES: u64 = 4;
/// Events that one call takes.
const EVENTS: usize = 8;
/// Calls of one input.
const CALLS_MAX: usize = 48;
/// Deadline of requests, and of the wait for their ends.
const PATIENCE: Duration = Duration::from_secs(20);

/// The two agents, which all inputs use one after the other.
struct World {
    agents: [u64; 2],
    /// The region of other agents, and those of the two agents.
    regions: [u64; 3],
    address: CString,
}

/// The numbers of log callbacks.
struct Callbacks {
    /// The callback of the log.
    present: AtomicUsize,
    /// The last one that a call had.
    last: AtomicUsize,
    is_wrong: AtomicBool,
}

static CALLBACKS: Callbacks = Callbacks {
    present: AtomicUsize::new(0),
    last: AtomicUsize::new(0),
    is_wrong: AtomicBool::new(false),
};

impl Callbacks {
    /// The number of a new callback, which can get lines from now on.
    fn take_number(&self) -> usize {
        self.last.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// The call with this callback has returned, so no other one can get lines.
    fn has_come(&self, callback: usize) {
        self.present.store(callback, Ordering::SeqCst);
        assert!(!self.is_wrong.load(Ordering::SeqCst), "a log callback was called wrongly");
    }
}

/// A log callback. A panic would end the process without a word, so it notes what is wrong.
unsafe extern "C" fn take_line(level: u32, line: *const c_char, data: *mut c_void) {
    let is_known = [&CALLBACKS.present, &CALLBACKS.last]
        .iter()
        .any(|callback| callback.load(Ordering::SeqCst) == data as usize);
    // SAFETY: the line ends with a zero.
    let is_text = unsafe { CStr::from_ptr(line) }.to_str().is_ok_and(|line| !line.is_empty());
    // SAFETY: there is no callback.
    let replaced = unsafe { baton_log(None, ptr::null_mut(), 0) };
    let is_refused = replaced == BatonError::Argument as i32;
    if !is_known || !is_text || !is_refused || level > BatonLogLevel::Debug as u32 {
        CALLBACKS.is_wrong.store(true, Ordering::SeqCst);
    }
}

/// What the events have told about a request.
#[derive(Default)]
struct Told {
    met: bool,
    outcome: bool,
    ended: bool,
}

fn layout() -> BatonLayout {
    let token = 2 * ELEMENT_BYTES;
    let head = token * u64::from(PAGE_SIZE);
    BatonLayout {
        pages: PAGES,
        page_size: PAGE_SIZE,
        layers: 1,
        kv_heads: 1,
        head_dim: 2,
        element: ELEMENT_F32,
        token_stride: token,
        head_stride: head,
        kv_stride: head,
        layer_stride: 2 * head,
        page_stride: 2 * head,
        ..BatonLayout::default()
    }
}

fn config(role: u32, region: u64) -> BatonConfig {
    BatonConfig {
        size: size_of::<BatonConfig>() as u32,
        role,
        region,
        layout: layout(),
        kind: [3; KIND_BYTES],
        host: ptr::null(),
        allow: ptr::null(),
        transports: ptr::null(),
        devices: ptr::null(),
        key: ptr::null(),
        key_bytes: 0,
        cpus: ptr::null(),
        cpus_len: 0,
        slots: 8,
        prompt_pages: 0,
        sessions: 0,
        lanes: 0,
        copy_threads: 0,
    }
}

fn region() -> u64 {
    let mut region = 0;
    // SAFETY: the place is writable.
    assert_eq!(unsafe { baton_region_new(4096, &mut region) }, 0);
    region
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let regions = [region(), region(), region()];
        let start = |role: BatonRole, region| {
            let mut agent = 0;
            // SAFETY: the configuration has no pointers, and the place is writable.
            let made = unsafe { baton_agent_new(&config(role as u32, region), &mut agent) };
            assert_eq!(made, 0);
            agent
        };
        let agents =
            [start(BatonRole::Source, regions[1]), start(BatonRole::Destination, regions[2])];
        let mut text = [0u8; 64];
        // SAFETY: the buffer has this length.
        let length = unsafe { baton_address(agents[0], text.as_mut_ptr().cast(), text.len()) };
        let address = CString::new(&text[..length as usize]).expect("an address has no zero");
        World { agents, regions, address }
    })
}

/// The bytes of an input, read as arguments.
struct Arguments<'a>(&'a [u8]);

impl Arguments<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn numbers(&mut self) -> Vec<u32> {
        let count = self.byte() % 40;
        (0..count).map(|_| u32::from(self.byte()) % (PAGES + 1)).collect()
    }
}

fn is_one(result: i32, errors: &[BatonError]) -> bool {
    errors.iter().any(|error| *error as i32 == result)
}

/// The result of a call: never that of a panic.
fn checked(result: i32) -> i32 {
    assert_ne!(result, BatonError::Panic as i32, "a call has panicked");
    result
}

/// One input: its calls, and what the agents have told about its requests.
struct Run<'a> {
    world: &'static World,
    arguments: Arguments<'a>,
    /// Rooms of this input alone.
    rooms: u64,
    /// By agent and request.
    told: HashMap<(usize, u64), Told>,
    known: Vec<(usize, u64)>,
    /// The last agent that this input has freed.
    freed: Option<u64>,
}

/// The input is a row of calls, each with its arguments.
pub fn run(data: &[u8]) {
    static ROOMS: AtomicU64 = AtomicU64::new(0);
    // An agent with many slots has large tables.
    memory::allow(64 << 20);
    let mut run = Run {
        world: world(),
        arguments: Arguments(data),
        rooms: ROOMS.fetch_add(8, Ordering::Relaxed),
        told: HashMap::new(),
        known: Vec::new(),
        freed: None,
    };
    for _ in 0..CALLS_MAX {
        if run.arguments.0.is_empty() {
            break;
        }
        run.call();
    }
    run.end();
}

impl Run<'_> {
    fn call(&mut self) {
        let kind = self.arguments.byte();
        match kind % 14 {
            0 | 1 => self.enter(0),
            2 | 3 => self.enter(1),
            4 => self.lease(),
            5 => {
                let ((agent, request), tokens) = (self.pick(), self.arguments.byte());
                checked(baton_compute(self.world.agents[agent], request, tokens.into()));
            }
            6 => self.send_last(),
            7 => {
                let (agent, request) = self.pick();
                checked(baton_cancel(self.world.agents[agent], request));
            }
            8 => self.release(),
            9 => {
                let len = usize::from(self.arguments.byte() % 8);
                (0..2).for_each(|agent| self.poll(agent, len + 1));
            }
            10 => self.call_with_garbage(),
            11 => self.start_with_garbage(),
            12 => self.adopt(),
            _ => self.log(),
        }
    }

    /// The log goes to another callback, at any level.
    fn log(&mut self) {
        let (level, callback) = (u32::from(self.arguments.byte() % 6), CALLBACKS.take_number());
        // SAFETY: any thread can call the callback with any number.
        let result = unsafe { baton_log(Some(take_line), callback as *mut c_void, level) };
        if level > BatonLogLevel::Debug as u32 {
            return assert_eq!(checked(result), BatonError::Argument as i32, "no such level");
        }
        assert_eq!(checked(result), 0);
        CALLBACKS.has_come(callback);
    }

    /// A known request, or any number.
    fn pick(&mut self) -> (usize, u64) {
        let byte = self.arguments.byte();
        match self.known.get(usize::from(byte)) {
            Some(&known) => known,
            None if byte > 200 => (usize::from(byte % 2), self.arguments.word()),
            None => self.known.last().copied().unwrap_or_default(),
        }
    }

    fn enter(&mut self, agent: usize) {
        let room = self.rooms + u64::from(self.arguments.byte() % 8);
        let ids = self.arguments.numbers();
        let is_source = agent == 0;
        let (entered, request) = self.enter_at(self.world.agents[agent], is_source, room, &ids);
        match ids.is_empty() {
            true => assert_eq!(entered, BatonError::Tokens as i32),
            false => assert!(entered == 0 || is_one(entered, &[BatonError::Full]), "{entered}"),
        }
        if entered == 0 {
            let before = self.told.insert((agent, request), Told::default());
            assert!(before.is_none(), "a request's number is new");
            self.known.push((agent, request));
        }
    }

    /// The result, and the request.
    fn enter_at(&self, agent: u64, is_source: bool, room: u64, ids: &[u32]) -> (i32, u64) {
        let (within, mut request) = (PATIENCE.as_millis() as u32, 0);
        let (first, len) = (ids.as_ptr(), ids.len());
        let source = self.world.address.as_ptr();
        // SAFETY: all pointers are those of living values.
        let entered = unsafe {
            match is_source {
                true => baton_offer(agent, room, first, len, within, &mut request),
                false => baton_wish(agent, room, source, first, len, within, &mut request),
            }
        };
        (checked(entered), request)
    }

    fn lease(&mut self) {
        let (agent, request) = self.pick();
        let (prefix, pages) = (self.arguments.byte() % 20, self.arguments.numbers());
        let handle = self.world.agents[agent];
        // SAFETY: the pages are those of a living list.
        checked(unsafe {
            baton_lease(handle, request, prefix.into(), pages.as_ptr(), pages.len())
        });
    }

    fn send_last(&mut self) {
        let ((agent, request), bytes) = (self.pick(), self.arguments.byte());
        let (payload, handle) = ([5u8; 255], self.world.agents[agent]);
        // SAFETY: the payload has more bytes.
        checked(unsafe { baton_send_last(handle, request, payload.as_ptr(), bytes.into()) });
    }

    fn release(&mut self) {
        let (agent, request) = self.pick();
        let released = checked(baton_release(self.world.agents[agent], request)) == 0;
        let told = self.told.get(&(agent, request));
        assert_eq!(released, told.is_some_and(|told| told.ended), "a release is after the end");
        if released {
            self.told.remove(&(agent, request));
            self.known.retain(|known| *known != (agent, request));
        }
    }

    /// Takes up to `len` events of an agent, at most [`EVENTS`].
    fn poll(&mut self, agent: usize, len: usize) {
        let mut events = [const { MaybeUninit::<BatonEvent>::uninit() }; EVENTS];
        // SAFETY: there is room for as many events.
        let taken = unsafe {
            let first = events.as_mut_ptr().cast();
            checked(baton_poll(self.world.agents[agent], first, len.min(EVENTS)))
        };
        let taken = usize::try_from(taken).expect("the agent lives");
        for event in &events[..taken] {
            // SAFETY: the call has written it.
            self.note(agent, unsafe { event.assume_init_ref() });
        }
    }

    fn note(&mut self, agent: usize, event: &BatonEvent) {
        let told = self.told.get_mut(&(agent, event.request));
        let told = told.expect("an event is that of a request");
        assert!(!told.ended, "no event follows the end");
        let is_failure = event.kind == BatonEventKind::Failed as u32;
        assert_eq!(event.cause != 0, is_failure, "a failure has a cause, and nothing else has");
        match event.kind {
            kind if kind == BatonEventKind::Met as u32 => {
                assert!(!told.met && !told.outcome, "both meet once, before the outcome");
                told.met = true;
            }
            kind if kind == BatonEventKind::Ended as u32 => {
                assert!(told.outcome, "an outcome comes before the end");
                told.ended = true;
            }
            _ => {
                assert!(!told.outcome, "there is one outcome");
                told.outcome = true;
            }
        }
    }

    /// Handles and pointers that name nothing.
    fn call_with_garbage(&mut self) {
        let (handle, request) = (self.arguments.word(), self.arguments.word());
        if self.world.agents.contains(&handle) || self.world.regions.contains(&handle) {
            return;
        }
        let (ids, mut places) = ([1u32, 2], [0u64; 2]);
        let odd = places.as_mut_ptr().wrapping_byte_add(1);
        // SAFETY: each pointer is null, or that of a living value with this length.
        unsafe {
            let agent = self.world.agents[0];
            let arguments = [
                baton_offer(agent, 1, ptr::null(), 2, 9, ptr::null_mut()),
                baton_offer(agent, 1, ids.as_ptr(), 2, 9, ptr::null_mut()),
                baton_offer(agent, 1, ids.as_ptr(), 2, 9, odd),
                baton_wish(agent, 1, ptr::null(), ids.as_ptr(), 2, 9, ptr::null_mut()),
                baton_lease(agent, request | 1 << 63, 0, ptr::null(), 2),
                baton_lease(agent, 0, 0, ids.as_ptr(), usize::MAX / 8),
                baton_send_last(agent, 0, ptr::null(), 7),
                baton_poll(agent, ptr::null_mut(), 1),
                baton_counters(agent, ptr::null_mut()),
                baton_agent_new(ptr::null(), ptr::null_mut()),
                baton_region_new(4096, ptr::null_mut()),
                baton_region_new(4096, odd),
                baton_region_adopt(ptr::null_mut::<c_void>(), 8, 1, ptr::null_mut()),
            ];
            let handles = [
                baton_offer(handle, 1, ids.as_ptr(), 2, 9, ptr::null_mut()),
                baton_poll(handle, ptr::null_mut(), 0),
                baton_region_free(handle),
                baton_agent_free(handle),
                baton_event_fd(handle),
                baton_wait(handle, 1),
                baton_address(handle, ptr::null_mut(), 9),
            ];
            assert_eq!(arguments, [BatonError::Argument as i32; 13]);
            assert_eq!(handles, [BatonError::Handle as i32; 7], "such a handle names nothing");
            assert!(baton_status(handle, ptr::null_mut()).is_null());
            baton_cause_name(handle as u32, ptr::null_mut(), 5);
        }
        assert!(!baton_error_name(handle as i32).is_null());
    }

    /// An agent with any settings. If it starts, it is freed.
    fn start_with_garbage(&mut self) {
        let mut wrong = config(1 + u32::from(self.arguments.byte() % 3), self.world.regions[0]);
        for _ in 0..self.arguments.byte() % 4 {
            let (field, value) = (self.arguments.byte() % 14, self.arguments.word());
            let layout = &mut wrong.layout;
            match field {
                0 => layout.pages = value as u32,
                1 => layout.page_size = value as u32,
                2 => layout.layers = value as u32,
                3 => layout.kv_heads = value as u32,
                4 => layout.head_dim = value as u32,
                5 => layout.element = value as u32,
                6 => layout.page_stride = value,
                7 => layout.rank_stride = value,
                8 => layout.ranks = value as u32,
                9 => layout.model_kv_heads = value as u32,
                10 => wrong.slots = value as u32 % 5000,
                11 => wrong.prompt_pages = value as u32,
                12 => wrong.lanes = value as u32,
                _ => wrong.size = value as u32,
            }
        }
        let mut agent = 0;
        // SAFETY: the configuration has no pointers, and the place is writable.
        let started = checked(unsafe { baton_agent_new(&wrong, &mut agent) });
        self.look_at_freed();
        match started {
            0 => self.free_with_open_requests(agent, wrong.role == BatonRole::Source as u32),
            _ => assert!(is_one(started, &[BatonError::Argument]), "{started}"),
        }
    }

    /// Frees an agent whose requests have not ended.
    fn free_with_open_requests(&mut self, agent: u64, is_source: bool) {
        for _ in 0..self.arguments.byte() % 4 {
            let (room, ids) = (self.rooms + 7, self.arguments.numbers());
            let (entered, request) = self.enter_at(agent, is_source, room, &ids);
            if entered == 0 {
                // SAFETY: the pages are those of a living list.
                checked(unsafe { baton_lease(agent, request, 0, ids.as_ptr(), ids.len().min(1)) });
                checked(baton_compute(agent, request, 1));
            }
        }
        assert_eq!(checked(baton_agent_free(agent)), 0);
        assert_eq!(checked(baton_agent_free(agent)), BatonError::Handle as i32);
        assert_eq!(checked(baton_cancel(agent, 1 << 32)), BatonError::Handle as i32);
        self.freed = Some(agent);
    }

    /// A new agent can have the entry of one that was freed, but not its handle.
    fn look_at_freed(&self) {
        if let Some(freed) = self.freed {
            let found = baton_event_fd(freed);
            assert_eq!(found, BatonError::Handle as i32, "a freed handle names nothing");
        }
    }

    /// Memory of this function, adopted at any place and with any length, under an agent.
    fn adopt(&mut self) {
        let bytes: [usize; 5] = std::array::from_fn(|_| self.arguments.byte().into());
        let (first, len) = (bytes[0] * 16 + bytes[1] % 16, bytes[2] * 48 + bytes[3] % 16);
        let remap = bytes[4] as u32 % 3;
        let mut memory: Vec<u64> = (0..2100).map(|word| word * 0x0101_0101).collect();
        let base = memory.as_mut_ptr().cast::<u8>().wrapping_add(first);
        let adopt = |base: *mut u8, len| {
            let mut region = 0;
            // SAFETY: the bytes are those of the vector, and nothing else uses them.
            (checked(unsafe { baton_region_adopt(base.cast(), len, remap, &mut region) }), region)
        };
        let (adopted, region) = adopt(base, len);
        if len == 0 || first % 8 > 0 || len % 8 > 0 || remap > 1 {
            return assert_eq!(adopted, BatonError::Argument as i32);
        }
        assert_eq!(adopted, 0);
        let again = adopt(base.wrapping_add(len - 8), 8).0;
        assert_eq!(again, BatonError::Argument as i32, "a byte is adopted once");
        let role = BatonRole::Source as u32 + u32::from(self.arguments.byte() % 2);
        let transports = if remap == 1 { c"shm,tcp" } else { c"tcp" };
        let (mut agent, mut settings) = (0, config(role, region));
        settings.transports = transports.as_ptr();
        // SAFETY: the text is static, and the place is writable.
        let started = checked(unsafe { baton_agent_new(&settings, &mut agent) });
        if len < PAGES as usize * layout().page_stride as usize {
            assert_eq!(started, BatonError::Argument as i32, "the memory has no room for the KV");
        } else {
            assert_eq!(started, 0);
            assert_eq!(checked(baton_region_free(region)), BatonError::Busy as i32);
            self.free_with_open_requests(agent, role == BatonRole::Source as u32);
        }
        assert_eq!(checked(baton_region_free(region)), 0);
        assert_eq!(checked(baton_region_free(region)), BatonError::Handle as i32);
        let is_same = (0..).zip(&memory).all(|(word, &held): (u64, _)| held == word * 0x0101_0101);
        assert!(is_same, "the memory keeps its content");
    }

    /// Ends all requests of the input, and its log.
    fn end(&mut self) {
        for &(agent, request) in &self.known {
            checked(baton_cancel(self.world.agents[agent], request));
        }
        let until = Instant::now() + PATIENCE;
        for agent in 0..2 {
            let len = 1 + self.known.len() % 3;
            while self.told.iter().any(|((at, _), told)| *at == agent && !told.ended) {
                let time = until.saturating_duration_since(Instant::now());
                assert!(!time.is_zero(), "a cancelled request does not end, or nothing signals it");
                // Events come, so the descriptor becomes readable. The alarms of libFuzzer end a
                // wait early.
                match checked(baton_wait(self.world.agents[agent], time.as_micros() as u64)) {
                    1 => self.poll(agent, len),
                    waited => assert_eq!(waited, 0),
                }
            }
        }
        for &(agent, request) in &self.known {
            let released = checked(baton_release(self.world.agents[agent], request));
            assert_eq!(released, 0, "a cancelled request is not released");
        }
        let none = CALLBACKS.take_number();
        // SAFETY: there is no callback.
        let ended = unsafe { baton_log(None, ptr::null_mut(), BatonLogLevel::Error as u32) };
        assert_eq!(checked(ended), 0);
        CALLBACKS.has_come(none);
    }
}
