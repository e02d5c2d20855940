//! The link check: core's fault path stands on nothing.
//!
//! A thread that is stopped on a fault may hold any lock of the C library and of the allocator, so what it runs then may
//! call neither, and may not panic. `xtask/trapcheck` is that path with opaque arguments; it is linked with no library,
//! only what its entry reaches is kept, and no symbol may stay undefined but the few that compilers emit for copies.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::steps::{cargo, output};

const ENTRY: &str = "selfpage_trapcheck";
const PANIC: &str = "selfpage_core_can_panic";
/// What a compiler may call for copies and comparisons.
const ALLOWED: [&str; 5] = ["memcpy", "memmove", "memset", "memcmp", "bcmp"];

/// Whether the path is linked as it stands, or with a deliberate panic in it.
#[derive(Clone, Copy)]
enum Variant {
    AsIs,
    Broken,
}

/// Links the path, and sees the same check fail on a broken one.
pub fn run(root: &Path) -> bool {
    let fine = show(&check(root, Variant::AsIs), "core's fault path links with nothing underneath");
    match check(root, Variant::Broken) {
        Err(said) if said.contains(PANIC) => {
            println!("link check: a deliberate panic in the path was caught");
            fine
        }
        Err(said) => {
            eprintln!("link check: the broken path failed for another reason than its panic:\n{said}");
            false
        }
        Ok(()) => {
            eprintln!("link check: a deliberate panic in the path was not noticed: the check is blind");
            false
        }
    }
}

/// Shows what a failure looks like.
pub fn run_broken(root: &Path) -> bool {
    show(&check(root, Variant::Broken), "the broken path linked: the check is blind")
}

fn show(checked: &Result<(), String>, fine: &str) -> bool {
    match checked {
        Ok(()) => println!("link check: {fine}"),
        Err(said) => eprintln!("link check: core's fault path needs what a trap does not have.\n{said}"),
    }
    checked.is_ok()
}

/// # Errors
/// What is missing, and the lines from which it can be reached.
fn check(root: &Path, variant: Variant) -> Result<(), String> {
    let archive = build(root, variant)?;
    let Err(said) = link(&archive, "--no-undefined") else {
        return Ok(());
    };
    let missing: BTreeSet<&str> =
        said.lines().filter_map(|line| line.split_once("undefined reference to `")?.1.strip_suffix('\'')).collect();
    if missing.is_empty() {
        return Err(said);
    }
    // Left unresolved it links, and the program says who calls what.
    link(&archive, "--unresolved-symbols=ignore-all").map_err(|more| format!("{said}\n{more}"))?;
    let program = archive.with_extension("elf");
    let code = output(Command::new("objdump").args(["-drC", "--no-show-raw-insn"]).arg(&program))?;
    let references = References::read(&code);
    let mut explained = String::new();
    for symbol in missing {
        let meaning = if symbol == PANIC { "a panic" } else { "outside of core" };
        explained += &format!("`{symbol}` ({meaning}) can be reached from:\n{}", references.explain(symbol, &program)?);
    }
    Err(explained)
}

fn build(root: &Path, path: Variant) -> Result<PathBuf, String> {
    let dir = root.join("xtask/trapcheck");
    let target = root.join("target/trapcheck");
    // The versions that the workspace ships.
    std::fs::copy(root.join("Cargo.lock"), dir.join("Cargo.lock")).map_err(|error| format!("Cargo.lock: {error}"))?;
    let mut cargo = cargo(&dir, "build --quiet --release --target-dir");
    cargo.arg(&target).env_remove("RUSTFLAGS");
    if matches!(path, Variant::Broken) {
        cargo.args(["--features", "broken"]);
    }
    output(&mut cargo)?;
    Ok(target.join("release/libselfpage_trapcheck.a"))
}

fn link(archive: &Path, undefined: &str) -> Result<(), String> {
    let allowed: String = ALLOWED.iter().map(|name| format!("PROVIDE({name} = {ENTRY});\n")).collect();
    let script = archive.with_extension("ld");
    std::fs::write(&script, allowed).map_err(|error| format!("{}: {error}", script.display()))?;
    let mut gcc = Command::new("gcc");
    gcc.args(["-static-pie", "-nostdlib", "-nostartfiles", "-Wl,--gc-sections"]);
    gcc.arg(format!("-Wl,-e,{ENTRY},--require-defined={ENTRY},{undefined}"));
    // The relocations say who calls whom.
    gcc.arg("-Wl,--emit-relocs");
    gcc.arg("-o").arg(archive.with_extension("elf")).arg(archive).arg(&script);
    output(&mut gcc).map(drop)
}

/// For each symbol, the functions that refer to it, and where.
struct References<'a>(HashMap<&'a str, Vec<(&'a str, &'a str)>>);

impl<'a> References<'a> {
    /// Reads `objdump -dr`. A call through a table shows its target only in the relocation.
    fn read(code: &'a str) -> Self {
        let mut references: HashMap<&str, Vec<(&str, &str)>> = HashMap::new();
        let mut function = "";
        for line in code.lines() {
            if let Some((_, name)) = line.strip_suffix(">:").and_then(|line| line.split_once(" <")) {
                function = name;
            } else if let Some((address, relocation)) = line.trim_start().split_once(": R_X86_64_")
                && let Some((_, target)) = relocation.split_once('\t')
            {
                let target = target.split_once("-0x").map_or(target, |(name, _)| name);
                references.entry(target).or_default().push((function, address));
            } else if let Some((address, instruction)) = line.trim_start().split_once(":\t")
                && let Some((_, target)) = instruction.strip_suffix('>').and_then(|text| text.split_once(" <"))
            {
                references.entry(target).or_default().push((function, address));
            }
        }
        References(references)
    }

    /// The source lines outside Rust's own `core` that lead to `symbol`, and who calls those.
    fn explain(&self, symbol: &str, program: &Path) -> Result<String, String> {
        let mut seen = BTreeSet::new();
        let mut open = vec![symbol];
        let mut causes = BTreeSet::new();
        while let Some(callee) = open.pop() {
            for &(caller, address) in self.0.get(callee).into_iter().flatten() {
                // On the way to it, not the cause.
                if ["core::", "<core::", "__rustc::"].iter().any(|inner| caller.starts_with(inner)) {
                    if seen.insert(caller) {
                        open.push(caller);
                    }
                } else if caller != callee {
                    let lines = output(Command::new("addr2line").args(["-ipfC", "-e"]).arg(program).arg(address))?;
                    let lines = lines.trim_end().replace('\n', "\n      ");
                    let above = self.callers(caller).join("\n    called by ");
                    causes.insert(format!("  {above}\n    by way of {callee}\n      {lines}\n"));
                }
            }
        }
        Ok(causes.into_iter().collect())
    }

    /// The function, its caller, its caller's caller and so on, as far as calls are direct.
    fn callers(&self, function: &'a str) -> Vec<&'a str> {
        let mut chain = vec![function];
        while let Some(&(caller, _)) = chain
            .last()
            .and_then(|last| self.0.get(last))
            .and_then(|callers| callers.iter().find(|(caller, _)| !chain.contains(caller)))
        {
            chain.push(caller);
        }
        chain
    }
}
