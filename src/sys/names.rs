//! Which services of the C library look host names up.
//!
//! A leaf with one function, for the main thread before there are others. Not here: lookups.
#![allow(unsafe_code)]

/// Has names looked up in `/etc/hosts` and by DNS only, if this file contains glibc. By default,
/// glibc loads the services of `/etc/nsswitch.conf`, which are libraries. One for another version
/// of glibc crashes the process. musl has no such services.
pub fn use_built_in_services() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        use std::ffi::{c_char, c_int};
        unsafe extern "C" {
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        // SAFETY: two strings that end with 0, and no other thread looks names up yet.
        let failed = unsafe { __nss_configure_lookup(c"hosts".as_ptr(), c"files dns".as_ptr()) };
        debug_assert_eq!(failed, 0, "glibc knows both services");
    }
}
