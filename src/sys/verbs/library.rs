//! The library's functions, looked up by name. The library is opened once and never closed because
//! providers keep threads and state.
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

/// Whether this build is one static file.
pub const IS_STATIC_BUILD: bool = cfg!(target_feature = "crt-static");

/// Why verbs are not available.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unavailable {
    /// This build is static. It loads no library, because a library needs the libc that it was
    /// built for.
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
                "this build is static and cannot load libibverbs.so.1; RDMA needs a dynamic build",
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
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of the library, with the header's signatures.
        pub struct Library {
            $(pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Library {
            fn open() -> Result<Library, Unavailable> {
                let handle = open(c"libibverbs.so.1")?;
                Ok(Library {
                    $($field: {
                        let found = symbol(handle, $symbol)?;
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
        }
    };
}

library! {
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut ListedDevice;
    free_device_list = c"ibv_free_device_list": fn(*mut *mut ListedDevice);
    get_device_name = c"ibv_get_device_name": fn(*mut ListedDevice) -> *const c_char;
    open_device = c"ibv_open_device": fn(*mut ListedDevice) -> *mut Context;
    close_device = c"ibv_close_device": fn(*mut Context) -> c_int;
    query_device = c"ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = c"ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_table = c"_ibv_query_gid_table":
        fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    alloc_pd = c"ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    // The header's macro `ibv_reg_mr` calls this function if flags are not compile-time constants.
    reg_mr = c"ibv_reg_mr_iova2": fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
    dereg_mr = c"ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel": fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut CompChannel) -> c_int;
    create_cq = c"ibv_create_cq":
        fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    destroy_cq = c"ibv_destroy_cq": fn(*mut Cq) -> c_int;
    get_cq_event = c"ibv_get_cq_event":
        fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events": fn(*mut Cq, c_uint);
    create_qp = c"ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = c"ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp": fn(*mut Qp) -> c_int;
}

impl Library {
    /// The library, opened on the first call.
    ///
    /// # Errors
    /// The library is missing or is the wrong one. Later calls return the same result.
    pub fn get() -> Result<&'static Library, Unavailable> {
        static LIBRARY: OnceLock<Result<Library, Unavailable>> = OnceLock::new();
        let open = || match IS_STATIC_BUILD {
            true => Err(Unavailable::StaticBuild),
            false => Library::open(),
        };
        LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

fn open(name: &CStr) -> Result<*mut c_void, Unavailable> {
    // SAFETY: the string ends with 0. The library's constructors are those of rdma-core.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if !handle.is_null() {
        return Ok(handle);
    }
    // SAFETY: no arguments. The result is null or a string that is valid until this thread's next
    // call.
    let error = unsafe { libc::dlerror() };
    let why = match error.is_null() {
        true => "no reason given".into(),
        // SAFETY: not null, so a string that ends with 0.
        false => unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned(),
    };
    // The message already names the library.
    Err(Unavailable::Library(why.strip_prefix("libibverbs.so.1: ").unwrap_or(&why).to_owned()))
}

fn symbol(handle: *mut c_void, name: &'static CStr) -> Result<*mut c_void, Unavailable> {
    // SAFETY: the handle is open and never closed.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() { Err(Unavailable::Function(name)) } else { Ok(found) }
}
