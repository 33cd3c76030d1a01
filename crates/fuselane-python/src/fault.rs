//! What is wrong with a call, on its way to a Python exception.

use std::cell::RefCell;

use pyo3::PyErr;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyTypeError, PyValueError};

/// Which exception it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `ValueError`: a shape, a stride, an option.
    Value,
    /// `TypeError`: a dtype.
    Type,
    /// `MemoryError`
    Memory,
    /// `RuntimeError`: ours.
    Bug,
}

/// A call that was refused.
#[derive(Debug, Clone)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) message: String,
}

impl Fault {
    pub(crate) fn value(message: impl Into<String>) -> Self {
        Self { kind: Kind::Value, message: message.into() }
    }

    /// A panic.
    pub(crate) fn bug(operator: &str) -> Self {
        Self {
            kind: Kind::Bug,
            message: format!("{operator}: a bug in fuselane, please report it"),
        }
    }

    pub(crate) fn dtype(message: impl Into<String>) -> Self {
        Self { kind: Kind::Type, message: message.into() }
    }
}

impl From<fuselane::Error> for Fault {
    fn from(error: fuselane::Error) -> Self {
        let kind = match (error.operator(), error.got()) {
            ("pool", _) => Kind::Memory,
            (_, got) if got.starts_with("has dtype") || got.starts_with("is of") => Kind::Type,
            _ => Kind::Value,
        };
        let mut message = error.to_string();
        if error.got().starts_with("has stride") {
            message += &format!(": call .contiguous() on {}", error.argument());
        }
        Self { kind, message }
    }
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> Self {
        match fault.kind {
            Kind::Value => PyValueError::new_err(fault.message),
            Kind::Type => PyTypeError::new_err(fault.message),
            Kind::Memory => PyMemoryError::new_err(fault.message),
            Kind::Bug => PyRuntimeError::new_err(fault.message),
        }
    }
}

thread_local! {
    static LAST: RefCell<Option<Fault>> = const { RefCell::new(None) };
}

/// Keeps a fault of this thread: PyTorch's dispatcher makes a `RuntimeError` of everything, and the
/// Python side asks for the true one.
pub(crate) fn keep(fault: Fault) {
    LAST.with(|last| *last.borrow_mut() = Some(fault));
}

/// The last fault of this thread, once.
pub(crate) fn take() -> Option<Fault> {
    LAST.with(|last| last.borrow_mut().take())
}
