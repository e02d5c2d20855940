//! What the dynamic loader makes of `LD_PRELOAD`.

use std::path::Path;

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
