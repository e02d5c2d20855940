//! How the library is linked.

fn main() {
    // Bound at load: a pager thread that resolved a symbol late would walk tables that the program's heap holds.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,now");
    // Rust's own library asks the C library for what a thread's handle needs: that is ours to give, and must not come from a `malloc` of the
    // program's own, whose memory a forked child's first pager thread cannot bring yet.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // It must stay: its threads and hooks are in use until the process ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
