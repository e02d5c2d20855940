//! What the dynamic loader makes of `LD_PRELOAD`.

use std::path::{Path, PathBuf};

/// How this program was built, and what stands beside it is.
const PROFILE: &str = if cfg!(debug_assertions) { "" } else { "--release " };
/// Where cargo puts what is built so.
const BUILT: &str = if cfg!(debug_assertions) { "target/debug" } else { "target/release" };

/// A library of ours: beside this program, or in the lib directory beside its own.
pub fn find(file: &str, package: &str) -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|cause| format!("cannot tell where I am: {cause}"))?;
    let here = own.parent().unwrap_or(Path::new("/"));
    let places = [here.join(file), here.join("../lib").join(file), here.join("../lib/selfpage").join(file)];
    places.into_iter().find(|path| path.is_file()).ok_or_else(|| {
        format!(
            "{file} is not in {} nor in ../lib; build it with `cargo build {PROFILE}-p {package}`, and copy it there from {BUILT}, or run \
             the tool from there",
            here.display()
        )
    })
}

/// Whether a library can be named there; if not, why, and what to do. The loader itself takes the name for several, and goes on without them.
pub fn can_preload(library: &Path) -> Result<(), String> {
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| b" :".contains(byte)) {
        return Err(format!(
            "{} cannot be preloaded: in LD_PRELOAD a name ends at a space or a colon; move selfpage to a directory whose path has \
             neither",
            library.display()
        ));
    }
    Ok(())
}
