//! The operands of a call by name, and what all operators ask of them: shapes, dtypes, contiguous rows, and no
//! output over an input.

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
        Self::with_statistics(like, inputs, outputs, 0, [], [])
    }
}

impl<'a, const I: usize, const O: usize, const SI: usize, const SO: usize>
    Operands<'a, I, O, SI, SO>
{
    /// Operands whose rows are all as long as those of `like`.
    pub(crate) fn with_statistics(
        like: Named<View<'a>>,
        inputs: [Named<Option<View<'a>>>; I],
        outputs: [Named<Option<ViewMut<'a>>>; O],
        statistics_len: usize,
        saved: [Named<Option<View<'a>>>; SI],
        save: [Named<Option<ViewMut<'a>>>; SO],
    ) -> Self {
        let (input_len, output_len) = ([None; I], [None; O]);
        Self { like, inputs, outputs, statistics_len, saved, save, input_len, output_len }
    }
    /// Checks the shape, dtype and rows of each operand, but not whether they overlap.
    pub(crate) fn check(&self, operator: &'static str) -> Result<()> {
        let like = self.like;
        let (dtype, real) = (like.1.dtype(), like.1.dtype().real());
        let Some(&len) = like.1.shape().last() else {
            let expected = "at least one (rows run along the last)";
            return Err(Error::new(operator, like.0, "has no dimensions", expected));
        };
        let inputs = self.inputs.iter().zip(&self.input_len);
        let inputs = inputs.map(|(&(name, view), own)| (name, view, dtype, own.unwrap_or(len)));
        let outputs = self.outputs.iter().zip(&self.output_len);
        let outputs = outputs.map(|((name, view), own)| {
            (*name, view.as_ref().map(ViewMut::as_view), dtype, own.unwrap_or(len))
        });
        let saved = self.saved.iter().map(|&(name, view)| (name, view, real, self.statistics_len));
        let save = self.save.iter().map(|(name, view)| {
            (*name, view.as_ref().map(ViewMut::as_view), real, self.statistics_len)
        });
        for (name, view, dtype, len) in inputs.chain(outputs).chain(saved).chain(save) {
            let Some(view) = view else { continue };
            check_shape(operator, (name, view), like, len)?;
            if view.dtype() != dtype {
                let why = if dtype == like.1.dtype() { "dtype of" } else { "arithmetic type of" };
                let expected = format!("{dtype} ({why} {})", like.0);
                return Err(Error::new(
                    operator,
                    name,
                    format!("has dtype {}", view.dtype()),
                    expected,
                ));
            }
            contiguous_rows(operator, name, view)?;
        }
        Ok(())
    }
}

/// An operand has the shape of `like`, but for its last dimension, `len`.
pub(crate) fn check_shape(
    operator: &'static str,
    (name, view): Named<View<'_>>,
    like: Named<View<'_>>,
    len: usize,
) -> Result<()> {
    let mut expected = [0; MAX_RANK];
    let expected = &mut expected[..like.1.rank()];
    expected.copy_from_slice(like.1.shape());
    if let Some(last) = expected.last_mut() {
        *last = len;
    }
    if view.shape() != expected {
        let expected = format!("{expected:?} (from {} {:?})", like.0, like.1.shape());
        return Err(wrong_shape(operator, name, view, expected));
    }
    Ok(())
}

/// The error about an operand's shape.
pub(crate) fn wrong_shape(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
    expected: impl Into<String>,
) -> Error {
    Error::new(operator, name, format!("has shape {:?}", view.shape()), expected)
}

/// A parameter has to be a vector as long as the last dimension of x.
pub(crate) fn check_parameter(
    operator: &'static str,
    name: &'static str,
    view: View<'_>,
    len: usize,
) -> Result<()> {
    if view.shape() != [len] {
        return Err(wrong_shape(operator, name, view, format!("[{len}] (last dimension of x)")));
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
            let got = format!("has stride {stride} in its last dimension");
            let expected = "1 (rows have to be contiguous; permute or copy it first)";
            Err(Error::new(operator, name, got, expected))
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
                let got = format!("overlaps {other_name} in memory");
                return Err(Error::new(operator, name, got, "memory of its own"));
            }
        }
    }
    Ok(())
}
