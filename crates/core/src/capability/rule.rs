//! The rules, each by its name. That no holder reads or writes memory without a capability for it rests on these and nothing else:
//! take any of them away, and the tests of that property find an access, or a state, that must not be.

use super::Error;
use super::kernel::Kernel;

/// A rule that calls must keep, or that the mechanism keeps itself.
///
/// # Source
/// Cichlid §3.2: "a small set of rules therefore captures all possible valid and authorized page table operations".
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Rule {
    /// Memory becomes only what its type may become.
    TypesDescend,
    /// RAM is retyped by holders who may write it.
    RetypeTakesWrite,
    /// Objects have the size of their type, and one that can be addressed.
    SizesFit,
    /// No byte is part of two objects made from the same memory.
    CarvedOnce,
    /// Objects lie within what they are made from.
    CarvedWithin,
    /// What the mechanism reads back begins empty.
    BeginsEmpty,
    /// A place holds one capability.
    PlaceIsFree,
    /// Only who may write a CNode puts capabilities into it.
    PlacingTakesWrite,
    /// Only who may write a CNode deletes what is in it, or revokes what came of that.
    RemovingTakesWrite,
    /// Only who may read a CNode looks things up in it.
    LookupTakesRead,
    /// Handles keep to the guards.
    GuardMatches,
    /// A place that was given to another CNode is no root any more.
    RootIsTheSame,
    /// A copy has no right that the original lacks.
    CopiesHaveLess,
    /// What others were derived from is not deleted.
    ChildlessWhenDeleted,
    /// An object with something in it is not deleted.
    EmptyWhenDeleted,
    /// What a CNode holds goes with it.
    ContentsGo,
    /// The entries that came of a capability go with it.
    EntriesGo,
    /// The entries of a table go with it.
    TableEntriesGo,
    /// Nothing is derived from what is being revoked, nor put into it.
    NotCondemned,
    /// Only who may write a table changes it.
    ChangingTakesWrite,
    /// A table holds what its level can hold.
    EntriesFit,
    /// An entry allows no more than the capability that it is made from.
    EntriesHaveLess,
    /// What is mapped can be read.
    EntriesAreReadable,
    /// A page begins at a multiple of its size.
    PagesAreAligned,
    /// A mapping stays within its object.
    MappedWithin,
    /// There are 512 entries.
    WithinTable,
    /// An entry comes of one capability.
    EntryIsFree,
    /// A capability is mapped in one place.
    MappedOnce,
    /// What was mapped together goes together.
    WholeMappings,
    /// The CPU forgets what no longer holds.
    StaleIsForgotten,
    /// The CPU does not translate by a root that is gone.
    LostRootIsLeft,
}

impl Rule {
    /// All of them.
    pub const ALL: [Rule; 31] = [
        Rule::TypesDescend,
        Rule::RetypeTakesWrite,
        Rule::SizesFit,
        Rule::CarvedOnce,
        Rule::CarvedWithin,
        Rule::BeginsEmpty,
        Rule::PlaceIsFree,
        Rule::PlacingTakesWrite,
        Rule::RemovingTakesWrite,
        Rule::LookupTakesRead,
        Rule::GuardMatches,
        Rule::RootIsTheSame,
        Rule::CopiesHaveLess,
        Rule::ChildlessWhenDeleted,
        Rule::EmptyWhenDeleted,
        Rule::ContentsGo,
        Rule::EntriesGo,
        Rule::TableEntriesGo,
        Rule::NotCondemned,
        Rule::ChangingTakesWrite,
        Rule::EntriesFit,
        Rule::EntriesHaveLess,
        Rule::EntriesAreReadable,
        Rule::PagesAreAligned,
        Rule::MappedWithin,
        Rule::WithinTable,
        Rule::EntryIsFree,
        Rule::MappedOnce,
        Rule::WholeMappings,
        Rule::StaleIsForgotten,
        Rule::LostRootIsLeft,
    ];

    /// What a call that breaks it is told. Calls cannot break those that the mechanism keeps itself.
    const fn error(self) -> Error {
        match self {
            Rule::TypesDescend | Rule::EntriesFit => Error::WrongType,
            Rule::RetypeTakesWrite
            | Rule::PlacingTakesWrite
            | Rule::RemovingTakesWrite
            | Rule::LookupTakesRead
            | Rule::ChangingTakesWrite
            | Rule::CopiesHaveLess
            | Rule::EntriesHaveLess => Error::NoRight,
            Rule::SizesFit => Error::BadSize,
            Rule::CarvedOnce | Rule::CarvedWithin => Error::OutOfMemory,
            Rule::PlaceIsFree => Error::SlotTaken,
            Rule::GuardMatches | Rule::RootIsTheSame => Error::NoCapability,
            Rule::ChildlessWhenDeleted | Rule::EmptyWhenDeleted => Error::InUse,
            Rule::NotCondemned => Error::RevokeInProgress,
            Rule::EntriesAreReadable => Error::NoSuchEntry,
            Rule::PagesAreAligned => Error::Misaligned,
            Rule::MappedWithin | Rule::WithinTable => Error::OutOfRange,
            Rule::EntryIsFree => Error::EntryTaken,
            Rule::MappedOnce => Error::AlreadyMapped,
            Rule::WholeMappings => Error::PartOfMapping,
            Rule::BeginsEmpty
            | Rule::ContentsGo
            | Rule::EntriesGo
            | Rule::TableEntriesGo
            | Rule::StaleIsForgotten
            | Rule::LostRootIsLeft => Error::InUse,
        }
    }
}

impl Kernel<'_> {
    /// Refuses a call that breaks a rule.
    pub(crate) const fn demand(&self, rule: Rule, kept: bool) -> Result<(), Error> {
        if kept || !self.keeps(rule) { Ok(()) } else { Err(rule.error()) }
    }

    /// Whether the mechanism keeps a rule: always, but where a test takes one away.
    #[cfg(not(feature = "sim"))]
    pub(crate) const fn keeps(&self, _rule: Rule) -> bool {
        true
    }

    /// Whether the mechanism keeps a rule: always, but where a test takes one away.
    #[cfg(feature = "sim")]
    pub(crate) const fn keeps(&self, rule: Rule) -> bool {
        match self.waived {
            Some(waived) => waived as u8 != rule as u8,
            None => true,
        }
    }

    /// Takes a rule away.
    #[cfg(feature = "sim")]
    pub const fn waive(&mut self, rule: Rule) {
        self.waived = Some(rule);
    }
}
