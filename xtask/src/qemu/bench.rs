//! What `selfpage bench` says on the emulated CPU, in instructions: kept as a run, and one system compared with the others.

use std::path::Path;

use super::after;

/// What the machine is comes last, marked.
pub const KEYS: &str = "$program bench appel-li --json --save /tmp/run \
    --case prot1 --case prot100 --case unprot100 --case prot100-scattered --case unprot100-scattered \
    --case trap --case appel1 --case appel2 --system selfpage-domain --system selfpage-upcall --system mprotect \
    && busybox sed 's/^/machine: /' /tmp/run/machine.txt";
pub const DIRTY: &str = "$program bench dirty --json --reps 1 --save /tmp/run --case arm-4k --case arm-2m --case scan \
    --case scan-and-rearm --case first-write && busybox sed 's/^/machine: /' /tmp/run/machine.txt";

/// What a table shows.
struct Comparison {
    /// This must have been measured, and what it and the others are compared with.
    ours: &'static str,
    others: &'static [&'static str],
    with: &'static str,
    /// What each line of ours must say, if anything, and what it means where one does not.
    mark: Option<(&'static str, &'static str)>,
}

const BY_KEYS: Comparison = Comparison {
    ours: "selfpage-domain",
    others: &["selfpage-upcall"],
    with: "mprotect",
    mark: Some(("\"protection_keys\":1,", "protection domains were measured without keys")),
};
const BY_SOFT_DIRTY: Comparison =
    Comparison { ours: "selfpage", others: &["mprotect", "fork"], with: "soft-dirty", mark: None };

/// A line of machine.txt that the guest cannot know of.
const CLOCK: &str = "clock: executed instructions, 1 ns each (qemu -icount shift=0,sleep=off): no time\n";

/// Keeps the run below `dir`, and shows the ratios.
///
/// # Errors
/// Domains were not measured, or not by keys; or the files could not be written.
pub fn conclude_keys(dir: &Path, shown: &str) -> Result<(), String> {
    conclude(&dir.join("run"), shown, &BY_KEYS)
}

/// As above, for dirty pages.
///
/// # Errors
/// They were not found by us, or not by soft-dirty bits; or the files could not be written.
pub fn conclude_dirty(dir: &Path, shown: &str) -> Result<(), String> {
    conclude(&dir.join("run-dirty"), shown, &BY_SOFT_DIRTY)
}

fn conclude(run: &Path, shown: &str, comparison: &Comparison) -> Result<(), String> {
    let lines: Vec<&str> = shown.lines().filter(|line| line.starts_with("{\"bench\":")).collect();
    let table = table(&lines, comparison)?;
    let machine = shown.lines().filter_map(|line| line.strip_prefix("machine: ")).map(|line| format!("{line}\n"));
    let write = |name, text: String| std::fs::write(run.join(name), text);
    std::fs::create_dir_all(run)
        .and_then(|()| write("raw.jsonl", lines.iter().map(|line| format!("{line}\n")).collect()))
        .and_then(|()| write("machine.txt", machine.chain([CLOCK.into()]).collect()))
        .map_err(|error| format!("{}: {error}", run.display()))?;
    print!("\n{table}");
    println!("Instructions in user and kernel mode; what the lines above call 1 ns is one of them, and no time.");
    println!("Behind each figure: how often {} takes as much.", comparison.with);
    println!("Kept in {}", run.display());
    Ok(())
}

/// A line for each case: what each system takes, and how often the last takes as much.
fn table(lines: &[&str], comparison: &Comparison) -> Result<String, String> {
    let records: Vec<Record<'_>> = lines.iter().filter_map(|line| Record::read(line)).collect();
    let Comparison { ours, others, with, mark } = comparison;
    let measured = |system: &str| records.iter().any(|record| record.system == system);
    if records.len() < lines.len() || !measured(ours) || !measured(with) {
        return Err(format!("the bench has not measured {ours} and {with}, or a line of it cannot be read"));
    }
    let mut of_ours = lines.iter().zip(&records).filter(|(_, record)| record.system == *ours);
    if let Some((mark, unmarked)) = mark
        && let Some((line, _)) = of_ours.find(|(line, _)| !line.contains(mark))
    {
        return Err(format!("{unmarked}: {line}"));
    }
    let compared = || [ours].into_iter().chain(*others);
    let heads: String = compared().map(|system| format!("{system:>24}")).collect();
    let mut table = format!("{:<20}{heads}{with:>12}\n", "instructions");
    for peer in records.iter().filter(|record| record.system == *with) {
        let cell = |system: &&str| {
            let found = records.iter().find(|record| (record.case, record.system) == (peer.case, *system));
            let cell = found.map(|found| format!("{:.1} ({:.1})", found.value, peer.value / found.value));
            format!("{:>24}", cell.unwrap_or("-".into()))
        };
        table += &format!("{:<20}{}{:>12.1}\n", peer.case, compared().map(cell).collect::<String>(), peer.value);
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
        let table = table(&[BY_DOMAIN, BY_UPCALL, BY_MPROTECT, &trap], &BY_KEYS).unwrap();
        let words = |line: usize| table.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(words(1), ["prot1", "125.5", "(60.0)", "5020.0", "(1.5)", "7530.0"]);
        assert_eq!(words(2), ["trap", "-", "-", "7530.0"]);
    }

    #[test]
    fn what_was_not_measured_by_keys_is_an_error() {
        let error = |lines: &[&str]| table(lines, &BY_KEYS).unwrap_err();
        let by_page_tables = BY_DOMAIN.replace("\"protection_keys\":1", "\"protection_keys\":0");
        assert!(error(&[&by_page_tables, BY_MPROTECT]).contains("without keys"));
        assert!(error(&[&BY_DOMAIN.replace("\"protection_keys\":1,", ""), BY_MPROTECT]).contains("without keys"));
        assert!(error(&[BY_UPCALL, BY_MPROTECT]).contains("has not measured"));
        assert!(error(&[]).contains("has not measured"));
        assert!(error(&[BY_DOMAIN, BY_MPROTECT, &BY_MPROTECT[..60]]).contains("cannot be read"));
    }

    #[test]
    fn dirty_pages_are_compared_with_what_soft_dirty_bits_take() {
        let ours = r#"{"bench":"dirty","case":"scan","system":"selfpage","value":10.5,"unit":"us"}"#;
        let bits = ours.replace("\"selfpage\",\"value\":10.5", "\"soft-dirty\",\"value\":21");
        let table = |lines: &[&str]| table(lines, &BY_SOFT_DIRTY);
        let shown = table(&[ours, &bits]).unwrap();
        let words: Vec<&str> = shown.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(words, ["scan", "10.5", "(2.0)", "-", "-", "21.0"]);
        assert!(table(&[ours]).unwrap_err().contains("has not measured selfpage and soft-dirty"));
    }

    #[test]
    fn a_run_is_kept_as_the_guest_showed_it() {
        let dir = std::env::temp_dir().join(format!("selfpage-qemu-bench-{}", std::process::id()));
        let shown = format!(
            "[1/2] prot1: 125.5 ns\n{BY_DOMAIN}\n{BY_MPROTECT}\nmachine: kernel: 6.12\nqemu: selfpage ended with 0\n"
        );
        conclude_keys(&dir, &shown).unwrap();
        let read = |name| std::fs::read_to_string(dir.join("run").join(name)).unwrap();
        let kept = (read("raw.jsonl"), read("machine.txt"));
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(kept, (format!("{BY_DOMAIN}\n{BY_MPROTECT}\n"), format!("kernel: 6.12\n{CLOCK}")));
    }
}
