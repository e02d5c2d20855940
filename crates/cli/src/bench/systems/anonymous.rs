//! The kernel's anonymous memory: with a swap file under it, or fresh for its first-touch fault.

use super::super::error::Error;
use super::super::raw::{Mapping, Memory};
use super::super::system::{Contents, Setup, System};

/// Private anonymous memory of 4 KiB pages.
pub struct Anonymous(Option<Mapping>);

impl Anonymous {
    /// Nothing mapped yet.
    pub fn unmapped() -> Box<dyn System> {
        Box::new(Anonymous(None))
    }
}

impl System for Anonymous {
    fn contents(&self) -> Contents {
        Contents::Undefined
    }

    fn map(&mut self, setup: &Setup<'_>) -> Result<Memory, Error> {
        let mapping = Mapping::anonymous(setup.data_bytes);
        let mapping = mapping.map_err(|error| Error::Failed(format!("map {} bytes: {error}", setup.data_bytes)))?;
        let memory = mapping.memory();
        self.0 = Some(mapping);
        Ok(memory)
    }

    fn put_out(&mut self) -> Result<(), Error> {
        let Some(mapping) = &self.0 else { return Ok(()) };
        mapping.page_out().map_err(|error| Error::Failed(format!("page out: {error}")))
    }

    fn finish(&mut self) -> Result<(), Error> {
        self.0 = None;
        Ok(())
    }
}
