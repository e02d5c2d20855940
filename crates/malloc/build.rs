//! How the library is linked.

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // What it says of its own functions (`by_handle`) is of its own also in a program that has some under the same names.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic-functions");
    // The unwinder comes with it, in place of a second library to load with every program.
    // Rust's standard library asks the linker for `gcc_s`. What it finds first is this script: the same functions, from archives.
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where to build"));
    std::fs::write(out.join("libgcc_s.so"), "GROUP ( -lgcc_eh -lgcc )\n").expect("a file in cargo's own directory");
    println!("cargo:rustc-link-search=native={}", out.display());
}
