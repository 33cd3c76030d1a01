//! Operators that are not written yet, with the functions that they will have: each one refuses
//! its call.

use fuselane::{Error, Result};

use crate::device::Device;
use crate::tensor::Tensor;

fn refuse(operator: &'static str) -> Result<()> {
    Err(Error::new(operator, "device", "is a GPU", "a CPU: this operator is not there yet"))
}

/// The angles of a position encoding.
#[derive(Debug, Clone, Copy)]
pub enum Angles<'a> {
    /// Frequencies.
    Theta(&'a Tensor),
    /// A table.
    Table(&'a AngleTable),
}

/// A table of sines and cosines.
#[derive(Debug)]
pub struct AngleTable;

impl AngleTable {
    /// Copies a table to a device.
    pub fn upload(_device: &Device, _table: &fuselane::AngleTable) -> Result<Self> {
        refuse("angles").map(|()| Self)
    }
}

/// Normalization.
pub mod normalize {
    use super::{Result, Tensor, refuse};
    use fuselane::Normalize;

    /// The residual.
    #[derive(Debug)]
    #[expect(missing_docs)]
    pub enum Residual<'a> {
        None,
        Add(&'a Tensor),
        AddInto(&'a Tensor, &'a mut Tensor),
        AddInPlace(&'a mut Tensor),
    }

    /// The operands of a forward.
    #[derive(Debug)]
    #[expect(missing_docs)]
    pub struct NormalizeForward<'a> {
        pub x: &'a Tensor,
        pub weight: Option<&'a Tensor>,
        pub bias: Option<&'a Tensor>,
        pub gate: Option<&'a Tensor>,
        pub residual: Residual<'a>,
        pub o: &'a mut Tensor,
        pub rstd: Option<&'a mut Tensor>,
        pub mean: Option<&'a mut Tensor>,
    }

    /// The operands of a backward.
    #[derive(Debug)]
    #[expect(missing_docs)]
    pub struct NormalizeBackward<'a> {
        pub grad: &'a Tensor,
        pub x: &'a Tensor,
        pub residual: Option<&'a Tensor>,
        pub gate: Option<&'a Tensor>,
        pub weight: Option<&'a Tensor>,
        pub bias: Option<&'a Tensor>,
        pub rstd: &'a Tensor,
        pub mean: Option<&'a Tensor>,
        pub grad_residual_out: Option<&'a Tensor>,
        pub dx: Option<&'a mut Tensor>,
        pub dresidual: Option<&'a mut Tensor>,
        pub dgate: Option<&'a mut Tensor>,
        pub dweight: Option<&'a mut Tensor>,
        pub dbias: Option<&'a mut Tensor>,
    }

    /// Writes the normalized x.
    pub fn forward_into(_: &Normalize, _call: NormalizeForward<'_>) -> Result<()> {
        refuse("normalize")
    }

    /// Writes the gradients that are asked for.
    pub fn backward_into(_: &Normalize, _call: NormalizeBackward<'_>) -> Result<()> {
        refuse("normalize")
    }
}

/// Rotary encoding.
pub mod rotate {
    use super::{Angles, Result, Tensor, refuse};
    use fuselane::Rotate;

    /// The operands of a backward.
    #[derive(Debug)]
    #[expect(missing_docs)]
    pub struct RotateBackward<'a> {
        pub x: Option<&'a Tensor>,
        pub grad: &'a Tensor,
        pub angles: Angles<'a>,
        pub dx: Option<&'a mut Tensor>,
        pub dtheta: Option<&'a mut Tensor>,
    }

    /// Writes the rotated x into `o`.
    pub fn forward_into(_: &Rotate<'_>, _x: &Tensor, _: Angles<'_>, _o: &mut Tensor) -> Result<()> {
        refuse("rotate")
    }

    /// Writes the gradients that are asked for.
    pub fn backward_into(_: &Rotate<'_>, _call: RotateBackward<'_>) -> Result<()> {
        refuse("rotate")
    }
}

/// Cosine encoding.
pub mod cosine {
    use super::{Angles, Result, Tensor, refuse};
    use fuselane::Cosine;

    /// The operands of a backward.
    #[derive(Debug)]
    #[expect(missing_docs)]
    pub struct CosineBackward<'a> {
        pub x: Option<&'a Tensor>,
        pub grad: &'a Tensor,
        pub angles: Angles<'a>,
        pub dx: Option<&'a mut Tensor>,
        pub dtheta: Option<&'a mut Tensor>,
    }

    /// Writes the encoded x into `o`.
    pub fn forward_into(_: &Cosine<'_>, _x: &Tensor, _: Angles<'_>, _o: &mut Tensor) -> Result<()> {
        refuse("cosine")
    }

    /// Writes the gradients that are asked for.
    pub fn backward_into(_: &Cosine<'_>, _call: CosineBackward<'_>) -> Result<()> {
        refuse("cosine")
    }
}
