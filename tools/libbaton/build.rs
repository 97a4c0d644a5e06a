//! Link options of the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Threads of the library can run when a program calls dlclose, so its code stays mapped.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libbaton.so.1");
}
