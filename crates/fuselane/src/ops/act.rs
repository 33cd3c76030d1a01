//! Elementwise activations.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// An elementwise activation `f`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Act {
    /// x
    #[default]
    None,
    /// max(x, 0)
    Relu,
    /// 1 / (1 + exp(-x))
    Sigmoid,
    /// x * sigmoid(x)
    Silu,
    /// tanh(x)
    Tanh,
    /// x * (1 + erf(x / sqrt 2)) / 2
    Gelu,
    /// x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
    GeluTanh,
    /// ln(1 + exp(x))
    Softplus,
    /// max(x, 0)^2
    ReluSquared,
}

impl Act {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::None,
        Self::Relu,
        Self::Sigmoid,
        Self::Silu,
        Self::Tanh,
        Self::Gelu,
        Self::GeluTanh,
        Self::Softplus,
        Self::ReluSquared,
    ];

    /// The name used on command lines and in Python, as in `"gelu_tanh"`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Relu => "relu",
            Self::Sigmoid => "sigmoid",
            Self::Silu => "silu",
            Self::Tanh => "tanh",
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_tanh",
            Self::Softplus => "softplus",
            Self::ReluSquared => "relu_squared",
        }
    }
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Act {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|act| act.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::new("act", "name", format!("is {name:?}"), format!("one of {names}"))
        })
    }
}
