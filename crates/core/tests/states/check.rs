//! What must hold in every state.

use selfpage_core::capability::{Rights, Type};
use selfpage_core::tables::{Entry, span_bits};

use crate::seen::{ENTRIES, Place, Seen, Table};

fn must(holds: bool, what: &'static str) -> Result<(), &'static str> {
    if holds { Ok(()) } else { Err(what) }
}

/// What is wrong with a state.
pub fn check(seen: &Seen) -> Result<(), &'static str> {
    let (mut has_parent, mut is_child) = (0, 0);
    for place in seen.live() {
        has_parent += usize::from(place.parent != 0);
        is_child += children(seen, place)?;
        mapping(seen, place)?;
        if place.parent != 0 {
            came_of(place, seen.at(place.parent).ok_or("it came of a capability that is gone")?)?;
        }
    }
    must(has_parent == is_child, "parents and children do not agree")?;
    for (node, taken) in seen.nodes.iter().zip(seen.taken) {
        let here = seen.live().filter(|place| place.at & !4095 == *node).count();
        must(here as u64 == taken, "a CNode counts its places wrongly")?;
    }
    for (table, may_be_frame) in seen.tables.iter().zip([false, false, false, true]) {
        match seen.origin_of(table) {
            Some(origin) => entries(seen, table, origin)?,
            None if may_be_frame => {}
            None => gone(table)?,
        }
    }
    Ok(())
}

/// Links agree both ways. How many children there are.
fn children(seen: &Seen, parent: &Place) -> Result<usize, &'static str> {
    let (mut elder, mut count, mut at) = (0, 0, parent.child);
    let mut made_before: [Option<&Place>; 8] = [None; 8];
    while at != 0 {
        let child = seen.at(at).ok_or("a link to a place that is empty")?;
        must(child.parent == parent.at, "a child of another")?;
        must(child.previous == elder, "a link that does not lead back")?;
        if !child.is_copy {
            let apart = made_before.iter().flatten().all(|other| !other.overlaps(child.base, child.end()));
            must(apart, "two objects in the same memory")?;
            *made_before.get_mut(count).ok_or("too many objects")? = Some(child);
        }
        count += 1;
        (elder, at) = (at, child.next);
    }
    Ok(count)
}

/// What a capability says, by the one that it came of.
fn came_of(place: &Place, parent: &Place) -> Result<(), &'static str> {
    // So no way up the tree ends where it began.
    must(place.serial > parent.serial, "older than what it came of")?;
    must(parent.rights.contain(place.rights), "more rights than what it came of")?;
    if place.is_copy {
        let same = (place.kind, place.base, place.size_bits) == (parent.kind, parent.base, parent.size_bits);
        return must(same, "a copy of something else");
    }
    must(parent.kind.becomes(place.kind), "made from what does not become that")?;
    must(parent.base <= place.base && place.end() <= parent.end(), "reaches beyond what it was made from")
}

/// Where a capability says that it is mapped, its entries are.
fn mapping(seen: &Seen, place: &Place) -> Result<(), &'static str> {
    let Some(mapping) = place.mapping else { return Ok(()) };
    let (_, table) = seen.table_of(mapping.table).ok_or("mapped in a table that is gone")?;
    let end = mapping.first + mapping.count;
    must(end <= ENTRIES, "mapped beyond the entries that were named")?;
    let mut origins = table.origins[mapping.first..end].iter();
    must(origins.all(|origin| *origin == place.at), "an entry of its mapping is another's")
}

/// The entries of a table.
fn entries(seen: &Seen, table: &Table, origin: &Place) -> Result<(), &'static str> {
    let level = origin.kind.level().unwrap_or(0);
    for (index, (word, from)) in table.entries.iter().zip(table.origins).enumerate() {
        if from == 0 {
            must(*word == 0, "an entry of unknown origin")?;
            continue;
        }
        let from = seen.at(from).ok_or("an entry outlived the capability that it came of")?;
        let mapping = from.mapping.ok_or("an entry of which its capability does not know")?;
        let knows = mapping.table == origin.at && (mapping.first..mapping.first + mapping.count).contains(&index);
        must(knows, "a capability with entries in two places")?;
        let entry = Entry(*word);
        must(entry.is_present(), "an entry that is not there")?;
        must(from.rights.contain(entry.rights()), "an entry that allows more than its capability")?;
        if entry.is_page(level) {
            page(seen, entry, level, from)?;
        } else {
            let fits = from.kind.level().is_some_and(|below| below + 1 == level) && entry.base().0 == from.base;
            must(fits, "a table where the CPU takes it for one of another level")?;
        }
    }
    Ok(())
}

fn page(seen: &Seen, entry: Entry, level: u8, from: &Place) -> Result<(), &'static str> {
    let (base, end) = (entry.base().0, entry.base().0 + (1 << span_bits(level)));
    must(base.is_multiple_of(1 << span_bits(level)), "a page that is not aligned")?;
    must(from.base <= base && end <= from.end(), "a page beyond the capability that it came of")?;
    match from.kind {
        Type::Frame => {
            let is_ours = |place: &Place| place.kind.level().is_some() || place.kind == Type::CNode;
            let mut ours = seen.live().filter(|place| is_ours(place));
            must(ours.all(|place| !place.overlaps(base, end)), "a table or a CNode can be reached as a page")
        }
        kind => {
            must(kind.level().is_some() && level == 1, "a page of what is neither Frame nor table")?;
            must(!entry.rights().contain(Rights::WRITE), "a table that can be written through a mapping")
        }
    }
}

/// Memory that is a table no longer.
fn gone(table: &Table) -> Result<(), &'static str> {
    let is_empty = table.origins.iter().chain(&table.entries).all(|word| *word == 0);
    must(is_empty, "entries are left in a table that is gone")
}
