//! Frequencies and tables of angles on a device.

use fuselane::plan::TableAxis;
use fuselane::{Error, Result, View};

use crate::device::Device;
use crate::tensor::Tensor;

/// The frequencies of a call: theta itself, or sines and cosines made from it before.
///
/// Theta has shape (h, e), (1, e), (h, 1) or (1, 1).
#[derive(Debug, Clone, Copy)]
pub enum Angles<'a> {
    /// Frequencies; sines and cosines are computed as they are needed.
    Theta(&'a Tensor),
    /// A table, shared by calls.
    Table(&'a AngleTable),
}

impl<'a> From<&'a Tensor> for Angles<'a> {
    fn from(theta: &'a Tensor) -> Self {
        Self::Theta(theta)
    }
}

impl<'a> From<&'a AngleTable> for Angles<'a> {
    fn from(table: &'a AngleTable) -> Self {
        Self::Table(table)
    }
}

impl<'a> Angles<'a> {
    /// As the core's checks know them.
    pub(crate) fn checked(&self) -> Result<fuselane::Angles<'a>> {
        Ok(match self {
            Self::Theta(theta) => fuselane::Angles::Theta(theta.view()?),
            Self::Table(table) => fuselane::Angles::Table(&table.host),
        })
    }

    /// The tensor that has to lie where the others do.
    pub(crate) fn tensor(&self) -> (&'static str, Option<&'a Tensor>) {
        match self {
            Self::Theta(theta) => ("theta", Some(theta)),
            Self::Table(table) => ("angle table", Some(&table.cosines)),
        }
    }
}

/// A [`fuselane::AngleTable`] in a device's memory. The host's table is saved for the checks of
/// calls.
///
/// ```no_run
/// use fuselane::{DType, View};
/// use fuselane_gpu::{AngleTable, Device};
/// let theta = [1.0f32, 0.1];
/// let theta = View::new(&theta, &[1, 2])?;
/// let table = fuselane::AngleTable::for_sequence(theta, 2, 0..1024, DType::BF16)?;
/// let table = AngleTable::upload(&Device::open()?, &table)?;
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct AngleTable {
    host: fuselane::AngleTable,
    cosines: Tensor,
    sines: Tensor,
}

impl AngleTable {
    /// Copies a table of f32 to the device.
    pub fn upload(device: &Device, table: &fuselane::AngleTable) -> Result<Self> {
        let (Some(cosines), Some(sines)) = (table.cosines_f32(), table.sines_f32()) else {
            let expected = "f32 (GPUs compute in it)";
            return Err(Error::new("angle_table", "table", "is of f64", expected));
        };
        let upload = |numbers: &[f32]| {
            let numbers = if numbers.is_empty() { &[0.0] } else { numbers };
            device.upload(View::new(numbers, &[numbers.len()])?)
        };
        Ok(Self { host: table.clone(), cosines: upload(cosines)?, sines: upload(sines)? })
    }

    pub(crate) fn axes(&self) -> &[TableAxis] {
        self.host.axes()
    }

    pub(crate) fn cosines(&self) -> &Tensor {
        &self.cosines
    }

    pub(crate) fn sines(&self) -> &Tensor {
        &self.sines
    }
}
