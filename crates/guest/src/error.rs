//! What went wrong: operation, cause and remedy.

use std::fmt;
use std::io;

/// What a caller can do about an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// This system lacks what is needed: the message names it and the remedy.
    Unsupported,
    /// The request makes no sense: change it.
    Invalid,
    /// Not enough memory or descriptors.
    OutOfSpace,
    /// KVM refused something that it should not.
    Refused,
}

/// An error of a virtual machine.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    operation: &'static str,
    cause: String,
    source: Option<io::Error>,
}

/// What calls return.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(kind: Kind, operation: &'static str, cause: impl Into<String>) -> Error {
        Error { kind, operation, cause: cause.into(), source: None }
    }

    /// The system said no.
    pub(crate) fn system(operation: &'static str, source: impl Into<io::Error>) -> Error {
        let source = source.into();
        let kind = match source.kind() {
            io::ErrorKind::OutOfMemory => Kind::OutOfSpace,
            io::ErrorKind::InvalidInput | io::ErrorKind::AlreadyExists => Kind::Invalid,
            _ => Kind::Refused,
        };
        Error { kind, operation, cause: source.to_string(), source: Some(source) }
    }

    /// KVM, or a machine of it, cannot be had.
    pub(crate) fn no_kvm(operation: &'static str, source: io::Error) -> Error {
        let remedy = match source.kind() {
            io::ErrorKind::NotFound => {
                "switch on virtualisation in the firmware, or nested virtualisation in the hypervisor, and load kvm_intel or kvm_amd"
            }
            io::ErrorKind::PermissionDenied => "add the user to the group kvm, or let a container have the device",
            io::ErrorKind::ResourceBusy => "another hypervisor has the processor: end its machines",
            _ => "see what the kernel's log says of kvm",
        };
        let cause = format!("{source}; {remedy}");
        Error { kind: Kind::Unsupported, operation, cause, source: Some(source) }
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.operation, self.cause)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_kvm_the_remedy_is_named() {
        for (errno, remedy) in [
            (libc::ENOENT, "load kvm_intel or kvm_amd"),
            (libc::EACCES, "add the user to the group kvm"),
            (libc::EPERM, "let a container have the device"),
            (libc::EBUSY, "end its machines"),
            (libc::ENODEV, "the kernel's log"),
        ] {
            let error = Error::no_kvm("open /dev/kvm", io::Error::from_raw_os_error(errno));
            assert_eq!(error.kind(), Kind::Unsupported);
            let said = error.to_string();
            assert!(said.starts_with("open /dev/kvm: ") && said.contains(remedy), "{said}");
        }
    }
}
