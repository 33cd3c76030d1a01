//! Frequencies, and tables of angles made of them.

use fuselane::{AngleTable, DType, Scaling, Theta, View};
use pyo3::prelude::*;

use crate::fault::Fault;
use crate::ops;

/// dim / 2 frequencies, highest first, and what queries and keys are multiplied by, beside.
///
/// `scaling` is none, linear, ntk, llama3 or yarn; `low` and `high` are the limits of the last two
/// (their own, where they are not given).
#[pyfunction]
pub(crate) fn theta(
    dim: usize,
    base: f64,
    scaling: &str,
    factor: f64,
    original_max_position: usize,
    low: Option<f64>,
    high: Option<f64>,
) -> PyResult<(Vec<f64>, f64)> {
    let scaling = match scaling {
        "none" => Scaling::None,
        "linear" => Scaling::Linear { factor },
        "ntk" => Scaling::Ntk { factor },
        "llama3" => Scaling::Llama3 {
            factor,
            low_freq_factor: low.unwrap_or(1.0),
            high_freq_factor: high.unwrap_or(4.0),
            original_max_position,
        },
        "yarn" => Scaling::Yarn {
            factor,
            original_max_position,
            beta_fast: high.unwrap_or(32.0),
            beta_slow: low.unwrap_or(1.0),
        },
        other => {
            let fault = Fault::value(format!(
                "theta: scaling is {other:?}, expected none, linear, ntk, llama3 or yarn"
            ));
            return Err(fault.into());
        }
    };
    let theta = Theta { dim, base, scaling };
    Ok((theta.frequencies().map_err(Fault::from)?, theta.attention_factor()))
}

/// A table of angles, which operators find by its number.
#[pyclass(frozen, module = "fuselane._native")]
pub(crate) struct Table {
    #[pyo3(get)]
    number: i64,
    #[pyo3(get)]
    bytes: usize,
}

#[pymethods]
impl Table {
    /// `theta` is a list of (heads) rows. With `grid`, for tokens on one; else for positions
    /// `start` to `end`.
    #[new]
    fn new(
        theta: Vec<Vec<f64>>,
        count: usize,
        start: i64,
        end: i64,
        grid: Vec<usize>,
        wide: bool,
    ) -> PyResult<Self> {
        let shape = [theta.len(), theta.first().map_or(0, Vec::len)];
        let values: Vec<f64> = theta.concat();
        let narrow: Vec<f32> = values.iter().map(|&value| value as f32).collect();
        let make = || -> Result<AngleTable, Fault> {
            let (view, dtype) = match wide {
                true => (View::new(&values, &shape)?, DType::F64),
                false => (View::new(&narrow, &shape)?, DType::F32),
            };
            Ok(match grid.is_empty() {
                true => AngleTable::for_sequence(view, count, start..end, dtype)?,
                false => AngleTable::for_grid(view, count, &grid, dtype)?,
            })
        };
        let table = make()?;
        let bytes = table.bytes();
        Ok(Self { number: ops::keep_table(table), bytes })
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        ops::drop_table(self.number);
    }
}
