//! The operators: for each one file with its formula, options, checks, forward, backward and
//! tests.

pub mod act;
pub mod angles;
pub mod cosine;
mod double;
pub mod encode;
#[cfg(test)]
mod non_temporal;
pub mod normalize;
pub mod rotate;
pub mod softmax;
pub mod theta;

/// The name that [`encode`] had.
pub use encode as tokens;

use crate::error::Result;
use crate::view::{View, ViewMut};

/// Moves the dimension that is contiguous in the output last, in all views alike, and tells which
/// one it was, for operators that do not care for the order of dimensions. A scalar becomes a row
/// of one.
pub(crate) fn contiguous_last<'a, const I: usize>(
    mut inputs: [View<'a>; I],
    output: ViewMut<'a>,
) -> Result<([View<'a>; I], ViewMut<'a>, usize)> {
    let rank = output.rank();
    if inputs.iter().any(|view| view.shape() != output.shape()) {
        return Ok((inputs, output, rank.saturating_sub(1))); // `Rows::new` says which
    }
    if rank == 0 {
        for view in &mut inputs {
            *view = view.reshape(&[1])?;
        }
        return Ok((inputs, output.reshape(&[1])?, 0));
    }
    let one = (0..rank).rev().find(|&d| output.strides()[d] == 1 && output.shape()[d] > 1);
    let last = one.unwrap_or(rank - 1);
    if last == rank - 1 {
        return Ok((inputs, output, last));
    }
    let mut order: Vec<usize> = (0..rank).filter(|&d| d != last).collect();
    order.push(last);
    for view in &mut inputs {
        *view = view.permute(&order)?;
    }
    Ok((inputs, output.permute(&order)?, last))
}
