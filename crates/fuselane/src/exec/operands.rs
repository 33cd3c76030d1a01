//! The operands of a call by name, and what all operators ask of them: shapes, dtypes, contiguous rows, and no
//! output over an input.

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::view::{MAX_RANK, View, ViewMut};

/// A named argument.
pub(crate) type Named<V> = (&'static str, V);

/// What [`Rows::new`](super::rows::Rows::new) takes.
pub(crate) struct Operands<'a, const I: usize, const O: usize, const SI: usize, const SO: usize> {
    /// The activations' dtype and the shape of all dimensions but the last: those of this view.
    pub(crate) like: Named<View<'a>>,
    pub(crate) inputs: [Named<Option<View<'a>>>; I],
    pub(crate) outputs: [Named<Option<ViewMut<'a>>>; O],
    /// The last dimension of each statistic.
    pub(crate) statistics_len: usize,
    pub(crate) saved: [Named<Option<View<'a>>>; SI],
    pub(crate) save: [Named<Option<ViewMut<'a>>>; SO],
    /// The last dimension of each input, then of each output, where it is not that of `like`.
    pub(crate) input_len: [Option<usize>; I],
    pub(crate) output_len: [Option<usize>; O],
}

impl<'a, const I: usize, const O: usize> Operands<'a, I, O, 0, 0> {
    /// Operands without statistics whose rows are all as long as those of `like`.
    pub(crate) fn plain(
        like: Named<View<'a>>,
        inputs: [Named<Option<View<'a>>>; I],
        outputs: [Named<Option<ViewMut<'a>>>; O],
    ) -> Self {
        Self {
            like,
            inputs,
            outputs,
            statistics_len: 0,
            saved: [],
            save: [],
            input_len: [None; I],
            output_len: [None; O],
        }
    }
}

impl<const I: usize, const O: usize, const SI: usize, const SO: usize> Operands<'_, I, O, SI, SO> {
    /// Checks the shape, dtype and rows of each operand, but not whether they overlap.
    pub(crate) fn check(&self, operator: &'static str) -> Result<()> {
        let like = self.like;
        let (dtype, real) = (like.1.dtype(), like.1.dtype().real());
        let Some(&len) = like.1.shape().last() else {
            return Err(Error::new(
                operator,
                like.0,
                "has no dimensions",
                "at least one (rows run along the last)",
            ));
        };
        for (i, &(name, view)) in self.inputs.iter().enumerate() {
            if let Some(view) = view {
                check(operator, &like, name, view, dtype, self.input_len[i].unwrap_or(len))?;
            }
        }
        for (i, (name, view)) in self.outputs.iter().enumerate() {
            if let Some(view) = view {
                let len = self.output_len[i].unwrap_or(len);
                check(operator, &like, name, view.as_view(), dtype, len)?;
            }
        }
        let statistics = self.statistics_len;
        for &(name, view) in &self.saved {
            if let Some(view) = view {
                check(operator, &like, name, view, real, statistics)?;
            }
        }
        for (name, view) in &self.save {
            if let Some(view) = view {
                check(operator, &like, name, view.as_view(), real, statistics)?;
            }
        }
        Ok(())
    }
}

/// Checks one operand against the shape of `like` (last dimension `len`) and `dtype`.
fn check(
    operator: &'static str,
    like: &Named<View<'_>>,
    name: &'static str,
    view: View<'_>,
    dtype: DType,
    len: usize,
) -> Result<()> {
    let mut expected = [0; MAX_RANK];
    let rank = like.1.rank();
    expected[..rank].copy_from_slice(like.1.shape());
    expected[rank - 1] = len;
    if view.shape() != &expected[..rank] {
        return Err(Error::new(
            operator,
            name,
            format!("has shape {:?}", view.shape()),
            format!("{:?} (from {} {:?})", &expected[..rank], like.0, like.1.shape()),
        ));
    }
    if view.dtype() != dtype {
        let why = if dtype == like.1.dtype() { "dtype of" } else { "arithmetic type of" };
        return Err(Error::new(
            operator,
            name,
            format!("has dtype {}", view.dtype()),
            format!("{dtype} ({why} {})", like.0),
        ));
    }
    contiguous_rows(operator, name, view)
}

/// A parameter has to be a vector as long as the last dimension of x.
pub(crate) fn check_parameter(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
    len: usize,
) -> Result<()> {
    if view.shape() != [len] {
        return Err(Error::new(
            operator,
            name,
            format!("has shape {:?}", view.shape()),
            format!("[{len}] (last dimension of x)"),
        ));
    }
    Ok(())
}

/// The last dimension has to be contiguous.
pub(crate) fn contiguous_rows(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
) -> Result<()> {
    match (view.shape().last(), view.strides().last()) {
        (Some(&size), Some(&stride)) if size > 1 && stride != 1 && !view.is_empty() => {
            Err(Error::new(
                operator,
                name,
                format!("has stride {stride} in its last dimension"),
                "1 (rows have to be contiguous; permute or copy it first)",
            ))
        }
        _ => Ok(()),
    }
}

/// No output may share memory with an input or another output.
pub(crate) fn disjoint(
    operator: &'static str,
    inputs: &[Named<Option<View<'_>>>],
    outputs: &[Named<View<'_>>],
) -> Result<()> {
    for (i, (name, output)) in outputs.iter().enumerate() {
        let others = inputs
            .iter()
            .filter_map(|&(name, view)| Some((name, view?)))
            .chain(outputs[..i].iter().copied());
        for (other_name, other) in others {
            let (a, b) = (output.span(), other.span());
            if a.start < b.end && b.start < a.end {
                return Err(Error::new(
                    operator,
                    name,
                    format!("overlaps {other_name} in memory"),
                    "memory of its own",
                ));
            }
        }
    }
    Ok(())
}
