//! The library's functions. They are looked up by name, or linked into a static file. The library
//! is opened once and never closed because providers keep threads and state.
//!
//! A [`Library`] is a table. Its users do not know whether the functions are those of the real
//! library or of a provider in this process.
//! Not here: posting and polling, which are in the table of each open device ([`ContextOps`]).
//!
//! [`ContextOps`]: super::abi::ContextOps
#![allow(unsafe_code)]

use super::abi::{
    CompChannel, Context, Cq, DeviceAttr, GidEntry, ListedDevice, Mr, Pd, PortAttr, Qp, QpAttr,
    QpInitAttr,
};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::sync::OnceLock;

/// How this build has the library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Linkage {
    /// It opens `libibverbs.so.1` at run time.
    Loaded,
    /// The library and its providers are in this static file.
    Contained,
    /// This static file does not have it.
    Absent,
}

/// How this build has the library. `tools/static-build --rdma` sets `static_verbs`.
pub const LINKAGE: Linkage = match (cfg!(static_verbs), cfg!(target_feature = "crt-static")) {
    (true, _) => Linkage::Contained,
    (false, true) => Linkage::Absent,
    (false, false) => Linkage::Loaded,
};

/// Why verbs are not available.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unavailable {
    /// This build is static, without the library. It loads none, because a library needs the libc
    /// that it was built for.
    StaticBuild,
    /// The library cannot be opened; the loader's message.
    Library(String),
    /// The library lacks this function. It is the wrong library.
    Function(&'static CStr),
    /// It cannot reach the kernel; the error number.
    Devices(i32),
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unavailable::StaticBuild => f.write_str(
                "this build is static and has no RDMA; RDMA needs a dynamic build, or the file of \
                 `tools/static-build --rdma`",
            ),
            Unavailable::Library(why) => write!(f, "libibverbs.so.1 cannot be opened: {why}"),
            Unavailable::Function(name) => {
                write!(f, "libibverbs.so.1 has no function {}", name.to_string_lossy())
            }
            Unavailable::Devices(error) => {
                write!(f, "devices cannot be listed: {}", std::io::Error::from_raw_os_error(*error))
            }
        }
    }
}

impl std::error::Error for Unavailable {}

macro_rules! library {
    ($($field:ident = $symbol:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of the library, with the header's signatures.
        pub struct Library {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            #[cfg(not(static_verbs))]
            fn find() -> Result<Library, Unavailable> {
                let handle = load::open(c"libibverbs.so.1")?;
                Ok(Library {
                    $($field: {
                        const NAME: &CStr = load::name(concat!(stringify!($symbol), "\0"));
                        let found = load::symbol(handle, NAME)?;
                        // SAFETY: the library's function of this name has this type. Its name and
                        // version have identified the interface since 2007, and a test compares the
                        // structs that it takes.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) $(-> $result)?,
                            >(found)
                        }
                    },)*
                })
            }

            #[cfg(static_verbs)]
            fn find() -> Result<Library, Unavailable> {
                unsafe extern "C" {
                    $(fn $symbol($(_: $argument),*) $(-> $result)?;)*
                }
                link_providers();
                Ok(Library { $($field: $symbol,)* })
            }
        }
    };
}

library! {
    get_device_list = ibv_get_device_list: fn(*mut c_int) -> *mut *mut ListedDevice;
    free_device_list = ibv_free_device_list: fn(*mut *mut ListedDevice);
    get_device_name = ibv_get_device_name: fn(*mut ListedDevice) -> *const c_char;
    open_device = ibv_open_device: fn(*mut ListedDevice) -> *mut Context;
    close_device = ibv_close_device: fn(*mut Context) -> c_int;
    query_device = ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_table = _ibv_query_gid_table:
        fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    alloc_pd = ibv_alloc_pd: fn(*mut Context) -> *mut Pd;
    dealloc_pd = ibv_dealloc_pd: fn(*mut Pd) -> c_int;
    // The header's macro `ibv_reg_mr` calls this function if flags are not compile-time constants.
    reg_mr = ibv_reg_mr_iova2: fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    dereg_mr = ibv_dereg_mr: fn(*mut Mr) -> c_int;
    create_comp_channel = ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    create_cq = ibv_create_cq:
        fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq = ibv_destroy_cq: fn(*mut Cq) -> c_int;
    get_cq_event = ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = ibv_ack_cq_events: fn(*mut Cq, c_uint);
    create_qp = ibv_create_qp: fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = ibv_destroy_qp: fn(*mut Qp) -> c_int;
}

impl Library {
    /// The library, opened on the first call if it is not in this file.
    ///
    /// # Errors
    /// The library is missing or is the wrong one. Later calls return the same result.
    pub fn get() -> Result<&'static Library, Unavailable> {
        static LIBRARY: OnceLock<Result<Library, Unavailable>> = OnceLock::new();
        let find = || match LINKAGE {
            Linkage::Absent => Err(Unavailable::StaticBuild),
            Linkage::Loaded | Linkage::Contained => Library::find(),
        };
        LIBRARY.get_or_init(find).as_ref().map_err(Clone::clone)
    }
}

/// Refers to all providers, so that the linker keeps them. Their constructors add them to the list.
#[cfg(static_verbs)]
fn link_providers() {
    unsafe extern "C" {
        fn ibv_static_providers(unused: *const c_void, ...);
        #[link_name = "verbs_provider_all"]
        static ALL: u8;
    }
    let none = std::ptr::null::<c_void>();
    // SAFETY: the function reads none of its arguments. The header calls it in the same way.
    unsafe { ibv_static_providers(none, &raw const ALL, none) }
}

/// Opens a library and looks its functions up.
#[cfg(not(static_verbs))]
mod load {
    use super::Unavailable;
    use std::ffi::{CStr, c_void};

    /// The name of a function, which ends with 0.
    pub const fn name(text: &'static str) -> &'static CStr {
        match CStr::from_bytes_with_nul(text.as_bytes()) {
            Ok(name) => name,
            Err(_) => panic!("a name ends with its only 0"),
        }
    }

    pub fn open(name: &CStr) -> Result<*mut c_void, Unavailable> {
        // SAFETY: the string ends with 0. The library's constructors are those of rdma-core.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(handle);
        }
        // SAFETY: no arguments. The result is null or a string that is valid until this thread's
        // next call.
        let error = unsafe { libc::dlerror() };
        let why = match error.is_null() {
            true => "no reason given".into(),
            // SAFETY: not null, so a string that ends with 0.
            false => unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned(),
        };
        // The message already names the library.
        Err(Unavailable::Library(why.strip_prefix("libibverbs.so.1: ").unwrap_or(&why).to_owned()))
    }

    pub fn symbol(handle: *mut c_void, name: &'static CStr) -> Result<*mut c_void, Unavailable> {
        // SAFETY: the handle is open and never closed.
        let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
        if found.is_null() { Err(Unavailable::Function(name)) } else { Ok(found) }
    }
}
