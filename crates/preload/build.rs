//! How the library is linked.

fn main() {
    // Bound at load: a pager thread that resolved a symbol late would walk tables that the program's heap holds.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,now");
    // It must stay: its threads and hooks are in use until the process ends.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo::rerun-if-changed=build.rs");
}
