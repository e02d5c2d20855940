//! A memory map of a file with a budget: a file larger than its frames is changed in place, and flushed.
//!
//! Run it with `cargo run --example file_map -p selfpage`.

use selfpage::{Domain, FileAccess};

const MIB: usize = 1 << 20;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::temp_dir().join(format!("selfpage-file-map-{}", std::process::id()));
    // Not a whole number of pages: the file keeps its length.
    std::fs::write(&path, vec![b'a'; 32 * MIB + 100])?;
    let result = capitalise(&path);
    let text = std::fs::read(&path)?;
    std::fs::remove_file(&path)?;
    result?;
    assert_eq!(text.len(), 32 * MIB + 100);
    assert!(text.iter().all(|byte| *byte == b'A'));
    Ok(())
}

fn capitalise(path: &std::path::Path) -> selfpage::Result<()> {
    let domain = Domain::with_frames(4 * MIB).policy("fifo").build()?;
    let mut file = domain.region(0).file(path, 0, FileAccess::ReadWrite)?;
    // The last page goes on behind the end of the file; that part is zero, and stays in memory.
    file.as_mut_slice::<u8>().iter_mut().for_each(|byte| byte.make_ascii_uppercase());
    // Returns when the file would survive a crash of the machine.
    file.flush(0, file.len_bytes())?;
    let stats = domain.stats();
    println!(
        "{} MiB changed within {} MiB of frames: {} MiB read, {} MiB saved, {} faults",
        file.len_bytes() / MIB,
        stats.resident_bytes_max / MIB as u64,
        stats.counts.bytes_filled / MIB as u64,
        stats.counts.bytes_saved / MIB as u64,
        stats.counts.faults_total
    );
    assert!(stats.resident_bytes_max <= 4 * MIB as u64);
    Ok(())
}
