//! The kernel's memory map of the data file.

use std::fs::{File, OpenOptions};

use super::super::error::Error;
use super::super::raw::{Mapping, Memory};
use super::super::system::{Contents, Setup, System};

/// What the kernel is told about the order of accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Nothing: it reads ahead as the disk's readahead says.
    Normal,
    /// MADV_RANDOM.
    Random,
}

/// A shared, writable map of the data file.
pub struct Mmap {
    advice: Advice,
    mapped: Option<(File, Mapping)>,
}

impl Mmap {
    /// Nothing mapped yet.
    pub fn with(advice: Advice) -> Box<dyn System> {
        Box::new(Mmap { advice, mapped: None })
    }
}

impl System for Mmap {
    fn contents(&self) -> Contents {
        Contents::File
    }

    fn map(&mut self, setup: &Setup<'_>) -> Result<Memory, Error> {
        let failed = |error| Error::io("map", setup.data_path, error);
        let file = OpenOptions::new().read(true).write(true).open(setup.data_path).map_err(failed)?;
        let mapping = Mapping::shared(&file, setup.data_bytes).map_err(failed)?;
        if self.advice == Advice::Random {
            mapping.expect_random().map_err(failed)?;
        }
        let memory = mapping.memory();
        self.mapped = Some((file, mapping));
        Ok(memory)
    }

    fn finish(&mut self) -> Result<(), Error> {
        let Some((file, mapping)) = self.mapped.take() else {
            return Ok(());
        };
        drop(mapping);
        file.sync_data().map_err(|error| Error::Failed(format!("sync the mapped file: {error}")))
    }
}
