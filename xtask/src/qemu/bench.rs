//! What `selfpage bench appel-li` says on the emulated CPU, in instructions: kept as a run, and compared with mprotect.

use std::path::Path;

use super::after;

/// What the machine is comes last, marked.
pub const COMMAND: &str = "$program bench appel-li --json --save /tmp/run \
    --case prot1 --case prot100 --case unprot100 --case prot100-scattered --case unprot100-scattered \
    --case trap --case appel1 --case appel2 --system selfpage-domain --system selfpage-upcall --system mprotect \
    && busybox sed 's/^/machine: /' /tmp/run/machine.txt";

const DOMAIN: &str = "selfpage-domain";
const MPROTECT: &str = "mprotect";

/// A line of machine.txt that the guest cannot know of.
const CLOCK: &str = "clock: executed instructions, 1 ns each (qemu -icount shift=0,sleep=off): no time\n";

/// Keeps the run below `dir`, and shows the ratios.
///
/// # Errors
/// Domains were not measured, or not by keys; or the files could not be written.
pub fn conclude(dir: &Path, shown: &str) -> Result<(), String> {
    let lines: Vec<&str> = shown.lines().filter(|line| line.starts_with("{\"bench\":")).collect();
    let table = table(&lines)?;
    let machine = shown.lines().filter_map(|line| line.strip_prefix("machine: ")).map(|line| format!("{line}\n"));
    let run = dir.join("run");
    let write = |name, text: String| std::fs::write(run.join(name), text);
    std::fs::create_dir_all(&run)
        .and_then(|()| write("raw.jsonl", lines.iter().map(|line| format!("{line}\n")).collect()))
        .and_then(|()| write("machine.txt", machine.chain([CLOCK.into()]).collect()))
        .map_err(|error| format!("{}: {error}", run.display()))?;
    print!("\n{table}");
    println!("Instructions in user and kernel mode; what the lines above call 1 ns is one of them, and no time.");
    println!("Behind each figure: how often mprotect takes as much.");
    println!("Kept in {}", run.display());
    Ok(())
}

/// A line for each case: what each system takes, and how often mprotect takes as much.
fn table(lines: &[&str]) -> Result<String, String> {
    let records: Vec<Record<'_>> = lines.iter().filter_map(|line| Record::read(line)).collect();
    let mut domains = lines.iter().zip(&records).filter(|(_, record)| record.system == DOMAIN).peekable();
    if records.len() < lines.len() || domains.peek().is_none() {
        return Err("the bench has not measured protection domains, or a line of it cannot be read".into());
    }
    if let Some((line, _)) = domains.find(|(line, _)| !line.contains("\"protection_keys\":1,")) {
        return Err(format!("protection domains were measured without keys: {line}"));
    }
    let mut table =
        format!("{:<20}{:>24}{:>24}{:>12}\n", "instructions", "selfpage-domain", "selfpage-upcall", MPROTECT);
    for peer in records.iter().filter(|record| record.system == MPROTECT) {
        let cell = |system: &str| {
            let ours = records.iter().find(|record| (record.case, record.system) == (peer.case, system));
            ours.map_or("-".into(), |ours| format!("{:.1} ({:.1})", ours.value, peer.value / ours.value))
        };
        let (domain, upcall) = (cell(DOMAIN), cell("selfpage-upcall"));
        table += &format!("{:<20}{domain:>24}{upcall:>24}{:>12.1}\n", peer.case, peer.value);
    }
    Ok(table)
}

/// A line of the bench.
struct Record<'a> {
    case: &'a str,
    system: &'a str,
    value: f64,
}

impl Record<'_> {
    fn read(line: &str) -> Option<Record<'_>> {
        let (case, system) = (after(line, "\"case\":\"", '"')?, after(line, "\"system\":\"", '"')?);
        Some(Record { case, system, value: after(line, "\"value\":", ',')?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BY_DOMAIN: &str =
        r#"{"bench":"appel-li","case":"prot1","system":"selfpage-domain","value":125.5,"protection_keys":1,"n":3}"#;
    const BY_UPCALL: &str =
        r#"{"bench":"appel-li","case":"prot1","system":"selfpage-upcall","value":5020,"unit":"ns"}"#;
    const BY_MPROTECT: &str = r#"{"bench":"appel-li","case":"prot1","system":"mprotect","value":7530,"unit":"ns"}"#;

    #[test]
    fn each_case_is_compared_with_mprotect() {
        let trap = BY_MPROTECT.replace("prot1", "trap");
        let table = table(&[BY_DOMAIN, BY_UPCALL, BY_MPROTECT, &trap]).unwrap();
        let words = |line: usize| table.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(words(1), ["prot1", "125.5", "(60.0)", "5020.0", "(1.5)", "7530.0"]);
        assert_eq!(words(2), ["trap", "-", "-", "7530.0"]);
    }

    #[test]
    fn what_was_not_measured_by_keys_is_an_error() {
        let error = |lines: &[&str]| table(lines).unwrap_err();
        let by_page_tables = BY_DOMAIN.replace("\"protection_keys\":1", "\"protection_keys\":0");
        assert!(error(&[&by_page_tables, BY_MPROTECT]).contains("without keys"));
        assert!(error(&[&BY_DOMAIN.replace("\"protection_keys\":1,", ""), BY_MPROTECT]).contains("without keys"));
        assert!(error(&[BY_UPCALL, BY_MPROTECT]).contains("has not measured"));
        assert!(error(&[]).contains("has not measured"));
        assert!(error(&[BY_DOMAIN, BY_MPROTECT, &BY_MPROTECT[..60]]).contains("cannot be read"));
    }

    #[test]
    fn a_run_is_kept_as_the_guest_showed_it() {
        let dir = std::env::temp_dir().join(format!("selfpage-qemu-bench-{}", std::process::id()));
        let shown = format!(
            "[1/2] prot1: 125.5 ns\n{BY_DOMAIN}\n{BY_MPROTECT}\nmachine: kernel: 6.12\nqemu: selfpage ended with 0\n"
        );
        conclude(&dir, &shown).unwrap();
        let read = |name| std::fs::read_to_string(dir.join("run").join(name)).unwrap();
        let kept = (read("raw.jsonl"), read("machine.txt"));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(kept, (format!("{BY_DOMAIN}\n{BY_MPROTECT}\n"), format!("kernel: 6.12\n{CLOCK}")));
    }
}
