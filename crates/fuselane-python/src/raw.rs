//! A tensor as it comes from Python: an address, an element type, a shape and strides.

use fuselane::{DType, MAX_RANK, View, ViewMut};

use crate::fault::Fault;

/// What the elements are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Float(DType),
    Int32,
    Int64,
    /// None that an operator takes, by its name.
    Other(&'static str),
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Float(DType::F32) => "float32",
            Self::Float(DType::F16) => "float16",
            Self::Float(DType::BF16) => "bfloat16",
            Self::Float(DType::F64) => "float64",
            Self::Int32 => "int32",
            Self::Int64 => "int64",
            Self::Other(name) => name,
        }
    }
}

/// A borrowed tensor. Whoever makes one keeps its memory alive until the call ends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Raw {
    ptr: *mut u8,
    kind: Kind,
    /// May be more than `MAX_RANK`; then shape and strides are cut.
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

// SAFETY: a pointer to plain numbers, which any thread may read; outputs are written by one call.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}

impl Raw {
    pub(crate) fn new(
        ptr: *mut u8,
        kind: Kind,
        shape: impl ExactSizeIterator<Item = usize>,
        strides: impl Iterator<Item = isize>,
    ) -> Self {
        let mut raw =
            Self { ptr, kind, rank: shape.len(), shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
        raw.shape.iter_mut().zip(shape).for_each(|(to, from)| *to = from);
        raw.strides.iter_mut().zip(strides).for_each(|(to, from)| *to = from);
        raw
    }

    /// What stands for a tensor that is none.
    pub(crate) fn nothing() -> Self {
        Self::new(std::ptr::null_mut(), Kind::Other("of nothing"), [].into_iter(), [].into_iter())
    }

    /// Whether it has elements, but not in memory.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.ptr.is_null() && self.len() > 0
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank.min(MAX_RANK)]
    }

    pub(crate) fn strides(&self) -> &[isize] {
        &self.strides[..self.rank.min(MAX_RANK)]
    }

    pub(crate) fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// Bytes of its elements, each counted once however often it is read.
    pub(crate) fn bytes(&self) -> usize {
        let size = match self.kind {
            Kind::Float(dtype) => dtype.size(),
            _ => 8,
        };
        self.len() * size
    }

    /// The float type, or the fault that there is none.
    pub(crate) fn dtype(&self, operator: &str, name: &str) -> Result<DType, Fault> {
        match self.kind {
            Kind::Float(dtype) => Ok(dtype),
            other => Err(Fault::dtype(format!(
                "{operator}: {name} has dtype {}, expected float32, float16, bfloat16 or float64",
                other.name()
            ))),
        }
    }

    fn check(&self, operator: &str, name: &str) -> Result<DType, Fault> {
        if self.rank > MAX_RANK {
            return Err(Fault::value(format!(
                "{operator}: {name} has {} dimensions, expected at most {MAX_RANK}",
                self.rank
            )));
        }
        self.dtype(operator, name)
    }

    /// To read.
    pub(crate) fn view(&self, operator: &str, name: &str) -> Result<View<'_>, Fault> {
        let dtype = self.check(operator, name)?;
        // SAFETY: the tensor's owner says where its elements are, and keeps them for the call.
        // That nobody writes them meanwhile is what every library of this kind asks of its users.
        Ok(unsafe { View::from_raw(self.ptr, dtype, self.shape(), self.strides()) }?)
    }

    /// To write; only for memory that was made for this call.
    pub(crate) fn view_mut(&self, operator: &str, name: &str) -> Result<ViewMut<'_>, Fault> {
        let dtype = self.check(operator, name)?;
        // SAFETY: `Edge::output` has just made this memory, and nobody else knows of it.
        Ok(unsafe { ViewMut::from_raw(self.ptr, dtype, self.shape(), self.strides()) }?)
    }

    /// Whole numbers, of which there are few: positions or ends of sequences.
    pub(crate) fn integers(&self, operator: &str, name: &str) -> Result<Vec<i64>, Fault> {
        let bytes: isize = match self.kind {
            Kind::Int32 => 4,
            Kind::Int64 => 8,
            other => {
                let got = format!("{operator}: {name} has dtype {}", other.name());
                return Err(Fault::dtype(got + ", expected int64 or int32"));
            }
        };
        if self.rank > MAX_RANK {
            self.check(operator, name)?;
        }
        let mut values = Vec::with_capacity(self.len());
        let mut index = [0usize; MAX_RANK];
        for _ in 0..self.len() {
            let at: isize =
                index.iter().zip(self.strides).map(|(&i, step)| i as isize * step).sum();
            let p = self.ptr.wrapping_offset(at * bytes);
            // SAFETY: an index within the shape, so an element of the tensor.
            values.push(unsafe {
                match self.kind {
                    Kind::Int32 => i64::from(p.cast::<i32>().read_unaligned()),
                    _ => p.cast::<i64>().read_unaligned(),
                }
            });
            for d in (0..self.shape().len()).rev() {
                index[d] += 1;
                if index[d] < self.shape[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        Ok(values)
    }

    /// The strides of a dense tensor with the order of dimensions that this one has in memory: its
    /// own, if it is dense. It is what `torch.empty_like` gives.
    pub(crate) fn dense_strides(&self) -> [isize; MAX_RANK] {
        let (shape, strides) = (self.shape(), self.strides());
        let rank = shape.len();
        let mut order = [0; MAX_RANK];
        order[..rank].iter_mut().enumerate().for_each(|(i, d)| *d = rank - 1 - i);
        let steps = strides.iter().map(|stride| stride.unsigned_abs());
        let mut strides = [0; MAX_RANK];
        strides.iter_mut().zip(steps).for_each(|(to, from)| *to = from);
        for i in 1..rank {
            let mut at = i;
            for before in (0..i).rev() {
                let (a, b) = (order[before], order[at]);
                // A repeated dimension says nothing about the order.
                let known = strides[a] != 0 && strides[b] != 0;
                if !known {
                    continue;
                }
                match strides[a].cmp(&strides[b]).then(shape[a].cmp(&shape[b])) {
                    std::cmp::Ordering::Greater => {
                        order.swap(before, at);
                        at = before;
                    }
                    std::cmp::Ordering::Less if strides[a] < strides[b] => break,
                    _ => {}
                }
            }
        }
        let mut dense = [0; MAX_RANK];
        let mut next = 1;
        for &d in &order[..rank] {
            dense[d] = next;
            next *= shape[d].max(1) as isize;
        }
        dense
    }
}

/// The strides of a dense tensor in index order.
pub(crate) fn row_major(shape: &[usize]) -> [isize; MAX_RANK] {
    let mut strides = [0; MAX_RANK];
    let mut next = 1;
    for d in (0..shape.len()).rev() {
        strides[d] = next;
        next *= shape[d].max(1) as isize;
    }
    strides
}
