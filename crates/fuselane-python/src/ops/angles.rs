//! What rotate and cosine share: where tokens stand, and tables of angles.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use fuselane::{AngleTable, Angles, FusedAct, Positions, RotateBackward, TokenLayout};

use super::{Edge, act_of, view, view_mut};
use crate::fault::Fault;
use crate::lock::Lock;
use crate::raw::Raw;

/// The tables that Python holds, by number: what passes through PyTorch's dispatcher are tensors and
/// numbers. A number is never given twice.
static TABLES: Lock<HashMap<i64, Arc<AngleTable>>> = Lock::new();
static NEXT: AtomicI64 = AtomicI64::new(0);

/// To be called in a forked child.
pub(crate) fn after_fork() {
    // SAFETY: as said. Tables are kept and dropped by Python's objects, with its lock.
    unsafe { TABLES.renew() };
}

/// Keeps a table and tells its number.
pub(crate) fn keep_table(table: AngleTable) -> i64 {
    if NEXT.load(Ordering::Relaxed) == 0 {
        // From a number that other processes do not have: one in a saved program is not taken for a
        // table of ours.
        let first = RandomState::new().build_hasher().finish() >> 2 | 1;
        let _ = NEXT.compare_exchange(0, first as i64, Ordering::Relaxed, Ordering::Relaxed);
    }
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    TABLES.lock().insert(number, Arc::new(table));
    number
}

/// Drops a table; calls that use it go on.
pub(crate) fn drop_table(number: i64) {
    let table = TABLES.lock().remove(&number);
    drop(table); // outside the lock
}

/// The arguments of both, in the order of their schemas:
/// `Tensor theta, Tensor? positions, Tensor? cu_seqlens, int table, int act, SymInt offset,
/// SymInt[] grid, SymInt extra_tokens, bool heads_first`.
pub(super) struct Arguments {
    theta: Raw,
    positions: Option<Raw>,
    ends: Option<Raw>,
    table: i64,
    act: i64,
    offset: i64,
    grid: Vec<i64>,
    extra_tokens: i64,
    heads_first: bool,
}

/// The same, checked, with what the core borrows.
pub(super) struct Checked {
    pub(super) act: FusedAct,
    pub(super) layout: TokenLayout,
    pub(super) extra_tokens: usize,
    offset: i64,
    positions: Option<(Vec<i64>, bool)>,
    ends: Option<Vec<usize>>,
    grid: Vec<usize>,
    table: Option<Arc<AngleTable>>,
    pub(super) theta: Raw,
}

impl Arguments {
    pub(super) fn take(edge: &mut dyn Edge) -> Self {
        Self {
            theta: edge.tensor(),
            positions: edge.optional(),
            ends: edge.optional(),
            table: edge.int(),
            act: edge.int(),
            offset: edge.int(),
            grid: edge.ints(),
            extra_tokens: edge.int(),
            heads_first: edge.flag(),
        }
    }

    pub(super) fn check(self, operator: &str) -> Result<Checked, Fault> {
        let elementwise = fuselane::Act::ALL.len() as i64;
        let act = match self.act - elementwise {
            0 => FusedAct::SoftmaxFeatures,
            1 => FusedAct::SoftmaxSequence,
            _ => FusedAct::Elementwise(act_of(operator, "act", self.act)?),
        };
        let unsigned = |name: &str, values: Vec<i64>| {
            let fault = |value: i64| {
                let got = format!("{operator}: {name} has {value}, expected none below 0");
                Fault::value(got)
            };
            let convert = |value: i64| usize::try_from(value).map_err(|_| fault(value));
            values.into_iter().map(convert).collect::<Result<Vec<usize>, Fault>>()
        };
        let integers = |raw: &Option<Raw>, name| {
            raw.as_ref().map(|raw| raw.integers(operator, name)).transpose()
        };
        let per_batch = self.positions.as_ref().is_some_and(|p| p.shape().len() == 2);
        if let Some(positions) = &self.positions
            && !matches!(positions.shape().len(), 1 | 2)
        {
            return Err(Fault::value(format!(
                "{operator}: positions has shape {:?}, expected (tokens) or (batch, tokens)",
                positions.shape()
            )));
        }
        if let Some(ends) = &self.ends
            && ends.shape().len() != 1
        {
            let got = format!("{operator}: cu_seqlens has shape {:?}", ends.shape());
            return Err(Fault::value(got + ", expected one dimension"));
        }
        let ends = integers(&self.ends, "cu_seqlens")?;
        let table = match self.table {
            0 => None,
            number => {
                let table = TABLES.lock().get(&number).cloned();
                let gone = format!("{operator}: table {number} is gone, expected one that is kept");
                Some(table.ok_or_else(|| Fault::value(gone))?)
            }
        };
        Ok(Checked {
            act,
            layout: match self.heads_first {
                true => TokenLayout::HeadsTokens,
                false => TokenLayout::TokensHeads,
            },
            extra_tokens: unsigned("extra_tokens", vec![self.extra_tokens])?[0],
            offset: self.offset,
            positions: integers(&self.positions, "positions")?.map(|p| (p, per_batch)),
            ends: ends.map(|ends| unsigned("cu_seqlens", ends)).transpose()?,
            grid: unsigned("shape", self.grid)?,
            table,
            theta: self.theta,
        })
    }
}

impl Checked {
    pub(super) fn positions(&self) -> Positions<'_> {
        match &self.positions {
            _ if !self.grid.is_empty() => Positions::Grid(&self.grid),
            Some((positions, true)) => Positions::PerBatch(positions),
            Some((positions, false)) => Positions::PerToken(positions),
            None => Positions::From(self.offset),
        }
    }

    pub(super) fn sequences(&self) -> Option<&[usize]> {
        self.ends.as_deref()
    }

    pub(super) fn angles(&self, operator: &str) -> Result<Angles<'_>, Fault> {
        match &self.table {
            Some(table) => Ok(Angles::Table(table)),
            None => Ok(Angles::Theta(self.theta.view(operator, "theta")?)),
        }
    }

    /// The operands of a backward, which are the same for both.
    pub(super) fn backward<'a>(
        &'a self,
        operator: &str,
        (grad, x): (&'a Raw, &'a Option<Raw>),
        (dx, dtheta): (&'a Option<Raw>, &'a Option<Raw>),
    ) -> Result<RotateBackward<'a>, Fault> {
        Ok(RotateBackward {
            x: view(operator, "x", x)?,
            grad: grad.view(operator, "grad")?,
            angles: self.angles(operator)?,
            dx: view_mut(operator, "dx", dx)?,
            dtheta: view_mut(operator, "dtheta", dtheta)?,
        })
    }
}
