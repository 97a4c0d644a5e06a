//! Links the unwinder into the binary, so that it needs no shared library but the system's libc.
//!
//! std names `-lgcc_s` itself, which no flag of gcc can change; a linker script of that name, found
//! first, can. A static build takes the archive anyway.

use std::env::var;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=tools/link/libgcc_s.so");
    let is_gnu = var("CARGO_CFG_TARGET_ENV").as_deref() == Ok("gnu");
    let is_static =
        var("CARGO_CFG_TARGET_FEATURE").is_ok_and(|features| features.contains("crt-static"));
    if is_gnu && !is_static {
        let root = var("CARGO_MANIFEST_DIR").expect("cargo sets it");
        println!("cargo::rustc-link-arg-bins=-L{root}/tools/link");
    }
}
