//! Shape and strides over the caller's memory, checked once, when the view is made.
//!
//! A [`View`] may have any strides: transposed, sliced, broadcast (stride 0) and reversed
//! (negative stride) views are normal input. A [`ViewMut`] must reach each of its elements by one
//! index only. Views carry their element type as a value, so that one call can mix
//! bf16 activations with f32 weights.

use std::fmt;
use std::marker::PhantomData;

use crate::dtype::{DType, Element, Real};
use crate::error::{Error, Result};

/// The largest number of dimensions of a view.
pub const MAX_RANK: usize = 8;

/// Shape and strides (in elements) of a tensor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [isize; MAX_RANK],
}

impl Layout {
    fn new(shape: &[usize], strides: &[isize]) -> Result<Self> {
        if shape.len() > MAX_RANK {
            let got = format!("has {} dimensions", shape.len());
            return refuse("shape", got, format!("at most {MAX_RANK}"));
        }
        if strides.len() != shape.len() {
            let expected = format!("{} (one per dimension of the shape)", shape.len());
            return refuse("strides", format!("has {} entries", strides.len()), expected);
        }
        let mut layout = Self { rank: shape.len(), shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
        layout.shape[..shape.len()].copy_from_slice(shape);
        layout.strides[..shape.len()].copy_from_slice(strides);
        let bytes = shape.iter().try_fold(8usize, |n, &s| n.checked_mul(s.max(1)));
        if bytes.is_none_or(|n| n > isize::MAX as usize) {
            let got = format!("{shape:?} overflows the address space");
            return refuse("shape", got, "a product of dimensions that fits");
        }
        Ok(layout)
    }

    /// Of elements in row-major order.
    pub(crate) fn contiguous(shape: &[usize]) -> Result<Self> {
        let mut strides = [0isize; MAX_RANK];
        let mut next = 1usize;
        for i in (0..shape.len().min(MAX_RANK)).rev() {
            strides[i] = next as isize;
            next = next.saturating_mul(shape[i].max(1));
        }
        // An overflow above makes the strides meaningless, and `new` refuses it.
        Self::new(shape, &strides[..shape.len().min(MAX_RANK)])
    }

    /// The same, of a slice of `len` elements.
    fn dense(shape: &[usize], len: usize) -> Result<Self> {
        let layout = Self::contiguous(shape)?;
        if layout.len() != len {
            let got = format!("{shape:?} has {} elements", layout.len());
            return refuse("shape", got, format!("{len} (length of the slice)"));
        }
        Ok(layout)
    }

    /// Any strides over a slice of `len` elements; index 0 lies at `offset`.
    fn strided(shape: &[usize], strides: &[isize], offset: usize, len: usize) -> Result<Self> {
        let layout = Self::new(shape, strides)?;
        let Some((low, high)) = layout.reach() else { return Ok(layout) };
        let inside = isize::try_from(offset).is_ok_and(|offset| {
            offset.checked_add(low).is_some_and(|first| first >= 0)
                && offset.checked_add(high).is_some_and(|last| (last as usize) < len)
        });
        if inside {
            return Ok(layout);
        }
        let got = format!("{strides:?} with shape {shape:?} and offset {offset} leave the slice");
        refuse("strides", got, format!("every element within its {len} elements"))
    }

    /// Any strides from an address on, which has to be aligned and not null if there are elements.
    fn at(ptr: *const u8, dtype: DType, shape: &[usize], strides: &[isize]) -> Result<Self> {
        let layout = Self::new(shape, strides)?;
        if layout.len() > 0 && (ptr.is_null() || !(ptr as usize).is_multiple_of(dtype.size())) {
            let size = dtype.size();
            let expected = format!("an address aligned to {size} bytes (size of {dtype})");
            return refuse("pointer", format!("is {ptr:?}"), expected);
        }
        Ok(layout)
    }

    pub(crate) fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    pub(crate) fn strides(&self) -> &[isize] {
        &self.strides[..self.rank]
    }

    pub(crate) fn len(&self) -> usize {
        self.shape().iter().product()
    }

    /// The lowest and highest element offset that an index reaches; `None` when empty.
    fn reach(&self) -> Option<(isize, isize)> {
        let (mut low, mut high) = (0isize, 0isize);
        for (&size, &stride) in self.shape().iter().zip(self.strides()) {
            let last = isize::try_from(size.checked_sub(1)?).ok()?;
            let end = stride.saturating_mul(last);
            if end < 0 {
                low = low.saturating_add(end);
            } else {
                high = high.saturating_add(end);
            }
        }
        Some((low, high))
    }

    /// Whether two indices can reach the same element. Sorted by stride, each dimension has to
    /// step over everything the smaller ones reach; this is exact for all views that permuting,
    /// slicing, splitting and reversing a dense tensor can make.
    fn overlaps_itself(&self) -> bool {
        let mut dims = [(0, 0); MAX_RANK];
        let mut count = 0;
        for (&size, &stride) in self.shape().iter().zip(self.strides()) {
            if size > 1 {
                dims[count] = (stride.unsigned_abs(), size);
                count += 1;
            }
        }
        dims[..count].sort_unstable();
        let mut reach = 0usize;
        for &(stride, size) in &dims[..count] {
            if stride <= reach {
                return true;
            }
            reach = reach.saturating_add(stride.saturating_mul(size - 1));
        }
        false
    }
}

fn refuse<T>(argument: &'static str, got: String, expected: impl Into<String>) -> Result<T> {
    Err(Error::new("view", argument, got, expected))
}

macro_rules! common {
    ($view:ident) => {
        impl $view<'_> {
            /// A view that was checked elsewhere.
            ///
            /// # Safety
            /// As for `from_raw`.
            pub(crate) unsafe fn over(ptr: *mut u8, dtype: DType, layout: Layout) -> Self {
                Self { ptr, dtype, layout, memory: PhantomData }
            }

            /// The size of each dimension.
            pub fn shape(&self) -> &[usize] {
                self.layout.shape()
            }

            /// The step of each dimension, in elements.
            pub fn strides(&self) -> &[isize] {
                self.layout.strides()
            }

            /// The number of dimensions.
            pub fn rank(&self) -> usize {
                self.layout.rank
            }

            /// The number of elements.
            pub fn len(&self) -> usize {
                self.layout.len()
            }

            /// Whether some dimension is zero.
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// The element type.
            pub fn dtype(&self) -> DType {
                self.dtype
            }

            /// Whether the elements lie in memory in index order, without gaps.
            pub fn is_contiguous(&self) -> bool {
                let mut next = 1isize;
                for (&size, &stride) in self.shape().iter().zip(self.strides()).rev() {
                    if size != 1 && stride != next {
                        return self.is_empty();
                    }
                    next *= size as isize;
                }
                true
            }

            /// The same memory with dimensions reordered: dimension `i` of the result is
            /// dimension `order[i]` of this view.
            pub fn permute(mut self, order: &[usize]) -> Result<Self> {
                let old = self.layout;
                let mut seen = [false; MAX_RANK];
                let valid = order.len() == old.rank
                    && order
                        .iter()
                        .all(|&d| d < old.rank && !std::mem::replace(&mut seen[d], true));
                if !valid {
                    let expected = format!("a permutation of 0..{}", old.rank);
                    return refuse("order", format!("is {order:?}"), expected);
                }
                for (i, &d) in order.iter().enumerate() {
                    self.layout.shape[i] = old.shape[d];
                    self.layout.strides[i] = old.strides[d];
                }
                Ok(self)
            }

            /// The part of dimension `dim` from `start`, `len` long.
            pub fn narrow(mut self, dim: usize, start: usize, len: usize) -> Result<Self> {
                let size = self.shape().get(dim).copied().unwrap_or(0);
                if dim >= self.rank() || start.checked_add(len).is_none_or(|end| end > size) {
                    let got = format!("takes {len} from {start} of dimension {dim}");
                    return refuse("narrow", got, format!("a part of shape {:?}", self.shape()));
                }
                if len > 0 {
                    // An empty view may have any strides; where it lies does not matter.
                    let skip = (start as isize)
                        .wrapping_mul(self.layout.strides[dim])
                        .wrapping_mul(self.dtype.size() as isize);
                    self.ptr = self.ptr.wrapping_offset(skip);
                }
                self.layout.shape[dim] = len;
                Ok(self)
            }

            /// The same memory under another shape with the same number of elements, in index order.
            /// The view has to be contiguous.
            pub fn reshape(mut self, shape: &[usize]) -> Result<Self> {
                let layout = Layout::dense(shape, self.len())?;
                if !self.is_contiguous() {
                    let got = format!("of a view with strides {:?}", self.strides());
                    return refuse("reshape", got, "a contiguous view");
                }
                self.layout = layout;
                Ok(self)
            }
        }

        impl fmt::Debug for $view<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($view))
                    .field("dtype", &self.dtype)
                    .field("shape", &self.shape())
                    .field("strides", &self.strides())
                    .finish_non_exhaustive()
            }
        }
    };
}

/// Memory to read, with shape and strides.
///
/// ```
/// use fuselane::View;
/// let x: Vec<f32> = (0..6).map(|i| i as f32).collect();
/// let x = View::new(&x, &[2, 3])?;
/// assert_eq!(x.strides(), [3, 1]);
/// assert_eq!(x.permute(&[1, 0])?.shape(), [3, 2]);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct View<'a> {
    ptr: *const u8,
    dtype: DType,
    layout: Layout,
    memory: PhantomData<&'a [u8]>,
}

/// Memory to write, with shape and strides that reach no element twice.
///
/// ```
/// use fuselane::ViewMut;
/// let mut o = [0.0f32; 4];
/// assert!(ViewMut::strided(&mut o, &[2, 4], &[0, 1], 0).is_err()); // both rows are the same memory
/// ```
pub struct ViewMut<'a> {
    ptr: *mut u8,
    dtype: DType,
    layout: Layout,
    memory: PhantomData<&'a mut [u8]>,
}

// SAFETY: a `View` is a shared borrow of plain numbers and a `ViewMut` an exclusive one, as the
// lifetimes in their markers say; numbers may be read and written from any thread.
unsafe impl Send for View<'_> {}
// SAFETY: as above.
unsafe impl Sync for View<'_> {}
// SAFETY: as above.
unsafe impl Send for ViewMut<'_> {}
// SAFETY: as above; a shared `ViewMut` gives no access to its memory.
unsafe impl Sync for ViewMut<'_> {}

common!(View);
common!(ViewMut);

impl<'a> View<'a> {
    /// A dense tensor: the slice in row-major order.
    pub fn new<T: Element>(data: &'a [T], shape: &[usize]) -> Result<Self> {
        let layout = Layout::dense(shape, data.len())?;
        Ok(Self { ptr: data.as_ptr().cast(), dtype: T::DTYPE, layout, memory: PhantomData })
    }

    /// Any strides (in elements) over a slice; index 0 lies at `offset`.
    pub fn strided<T: Element>(
        data: &'a [T],
        shape: &[usize],
        strides: &[isize],
        offset: usize,
    ) -> Result<Self> {
        let layout = Layout::strided(shape, strides, offset, data.len())?;
        let ptr = data.as_ptr().wrapping_add(offset).cast();
        Ok(Self { ptr, dtype: T::DTYPE, layout, memory: PhantomData })
    }

    /// The dense view of a shape over no memory, to check the shape before memory is made.
    pub(crate) fn dense_shape(dtype: DType, shape: &[usize]) -> Result<Self> {
        let ptr = std::ptr::null();
        Ok(Self { ptr, dtype, layout: Layout::contiguous(shape)?, memory: PhantomData })
    }

    /// A view of foreign memory; index 0 lies at `ptr`.
    ///
    /// # Safety
    ///
    /// Every element that `shape` and `strides` (in elements) reach from `ptr` must be aligned,
    /// initialised memory of type `dtype` that nobody writes during `'a`. The operators' `check_`
    /// functions read and write nothing: a view that goes to no other function may have any aligned
    /// address that is not null.
    pub unsafe fn from_raw(
        ptr: *const u8,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> Result<Self> {
        let layout = Layout::at(ptr, dtype, shape, strides)?;
        Ok(Self { ptr, dtype, layout, memory: PhantomData })
    }

    /// Repeats dimensions of size 1 (and adds leading ones) up to `shape`, without a copy.
    pub fn broadcast(self, shape: &[usize]) -> Result<Self> {
        let refused = || {
            let got = format!("from shape {:?} to {shape:?}", self.shape());
            refuse("broadcast", got, "dimensions that are equal or 1, aligned at the last")
        };
        let Some(lead) = shape.len().checked_sub(self.rank()) else { return refused() };
        let mut strides = [0isize; MAX_RANK];
        for (i, (&size, &stride)) in self.shape().iter().zip(self.strides()).enumerate() {
            if lead + i >= MAX_RANK || (size != shape[lead + i] && size != 1) {
                return refused();
            }
            strides[lead + i] = if size == 1 { 0 } else { stride };
        }
        let layout = Layout::new(shape, &strides[..shape.len().min(MAX_RANK)])?;
        Ok(Self { layout, ..self })
    }

    /// The byte addresses that the view reaches, from the first to the last.
    pub(crate) fn span(&self) -> std::ops::Range<usize> {
        let (base, size) = (self.ptr as isize, self.dtype.size() as isize);
        self.layout.reach().map_or(0..0, |(low, high)| {
            (base + low * size) as usize..(base + (high + 1) * size) as usize
        })
    }

    /// The address of index 0.
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr
    }

    /// The elements in index order, widened to f64: for checks, not for speed.
    pub fn to_f64_vec(&self) -> Vec<f64> {
        crate::dtype::with_element!(self.dtype, T => {
            let mut values = Vec::with_capacity(self.len());
            for_each_offset(&self.layout, |offset| {
                // SAFETY: the view was checked (or promised, `from_raw`) to hold every element
                // that an index reaches, of this type.
                values.push(unsafe { self.ptr.cast::<T>().offset(offset).read() }.to_f64());
            });
            values
        })
    }

    /// The elements in index order, if they follow each other in memory.
    pub(crate) fn contiguous<T: Element>(&self) -> Option<&'a [T]> {
        if self.is_empty() || self.dtype != T::DTYPE || !self.is_contiguous() {
            return None;
        }
        // SAFETY: as in `to_f64_vec`; in index order the elements follow each other.
        Some(unsafe { std::slice::from_raw_parts(self.ptr.cast::<T>(), self.len()) })
    }

    /// Widens the elements, in index order, into `out`. Every NaN becomes the usual one, whose
    /// payload survives rounding to 16 bits.
    pub(crate) fn widen<R: Real>(&self, out: &mut [R]) {
        let mut next = out.iter_mut();
        crate::dtype::with_element!(self.dtype, T => {
            for_each_offset(&self.layout, |offset| {
                // SAFETY: as in `to_f64_vec`.
                let value = unsafe { self.ptr.cast::<T>().offset(offset).read() }.to_f64();
                if let Some(out) = next.next() {
                    *out = if value.is_nan() { R::of(-f64::NAN) } else { R::of(value) };
                }
            });
        });
    }
}

impl<'a> ViewMut<'a> {
    /// A dense tensor: the slice in row-major order.
    pub fn new<T: Element>(data: &'a mut [T], shape: &[usize]) -> Result<Self> {
        let layout = Layout::dense(shape, data.len())?;
        Ok(Self { ptr: data.as_mut_ptr().cast(), dtype: T::DTYPE, layout, memory: PhantomData })
    }

    /// Any strides (in elements) over a slice; index 0 lies at `offset`. No two indices may
    /// reach the same element.
    pub fn strided<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: &[isize],
        offset: usize,
    ) -> Result<Self> {
        let layout = Layout::strided(shape, strides, offset, data.len())?;
        let ptr = data.as_mut_ptr().wrapping_add(offset).cast();
        Self { ptr, dtype: T::DTYPE, layout, memory: PhantomData }.checked()
    }

    /// A view of foreign memory to write; index 0 lies at `ptr`.
    ///
    /// # Safety
    ///
    /// Every element that `shape` and `strides` (in elements) reach from `ptr` must be aligned
    /// memory for `dtype`, initialised to any bits, that nobody else reads or writes during `'a`.
    /// (Calls also refuse an output whose addresses meet those of an input, as a safeguard.)
    /// For a view that goes to the operators' `check_` functions only, [`View::from_raw`] says what is
    /// enough.
    pub unsafe fn from_raw(
        ptr: *mut u8,
        dtype: DType,
        shape: &[usize],
        strides: &[isize],
    ) -> Result<Self> {
        let layout = Layout::at(ptr, dtype, shape, strides)?;
        Self { ptr, dtype, layout, memory: PhantomData }.checked()
    }

    fn checked(self) -> Result<Self> {
        if !self.is_empty() && self.layout.overlaps_itself() {
            let (shape, strides) = (self.shape(), self.strides());
            let got = format!("{strides:?} reach elements of shape {shape:?} more than once");
            return refuse("strides", got, "an output without overlaps");
        }
        Ok(self)
    }

    /// A shorter borrow of the same memory, to use the view again afterwards.
    pub fn reborrow(&mut self) -> ViewMut<'_> {
        ViewMut { ptr: self.ptr, dtype: self.dtype, layout: self.layout, memory: PhantomData }
    }

    /// A view to read.
    pub fn as_view(&self) -> View<'_> {
        View { ptr: self.ptr, dtype: self.dtype, layout: self.layout, memory: PhantomData }
    }

    /// The address of index 0.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr
    }

    /// The elements in index order, if they follow each other in memory.
    pub(crate) fn contiguous_mut<T: Element>(&mut self) -> Option<&mut [T]> {
        if self.is_empty() || self.dtype != T::DTYPE || !self.is_contiguous() {
            return None;
        }
        // SAFETY: as in `round_from`; in index order the elements follow each other.
        Some(unsafe { std::slice::from_raw_parts_mut(self.ptr.cast::<T>(), self.len()) })
    }

    /// Writes zeros.
    pub(crate) fn fill_zero(&mut self) {
        crate::dtype::with_element!(self.dtype, T => {
            for_each_offset(&self.layout, |offset| {
                // SAFETY: as in `round_from`.
                unsafe { self.ptr.cast::<T>().offset(offset).write(T::default()) };
            });
        });
    }

    /// Rounds `values`, in index order, into the elements.
    pub(crate) fn round_from<R: Real>(&mut self, values: &[R]) {
        let mut next = values.iter();
        crate::dtype::with_element!(self.dtype, T => {
            for_each_offset(&self.layout, |offset| {
                if let Some(value) = next.next() {
                    let element = <T as Element>::from_f64(value.to_f64());
                    // SAFETY: the view was checked (or promised, `from_raw`) to hold every
                    // element that an index reaches, of this type, for us alone.
                    unsafe { self.ptr.cast::<T>().offset(offset).write(element) };
                }
            });
        });
    }

    /// For plans of in-place calls, which read and write through the same pointer.
    pub(crate) fn raw(&self) -> *mut u8 {
        self.ptr
    }
}

/// Calls `visit` with the element offset of each index, in index order.
fn for_each_offset(layout: &Layout, mut visit: impl FnMut(isize)) {
    if layout.len() == 0 {
        return;
    }
    let mut index = [0usize; MAX_RANK];
    let mut offset = 0isize;
    let last = layout.rank.saturating_sub(1);
    'next: loop {
        for i in 0..layout.shape[last] as isize {
            visit(offset.wrapping_add(layout.strides[last].wrapping_mul(i)));
        }
        for d in (0..last).rev() {
            index[d] += 1;
            // One past the last index may lie anywhere, and the stride of a single index may be
            // anything; both are taken back before the offset is used.
            offset = offset.wrapping_add(layout.strides[d]);
            if index[d] < layout.shape[d] {
                continue 'next;
            }
            offset = offset.wrapping_sub(layout.strides[d].wrapping_mul(layout.shape[d] as isize));
            index[d] = 0;
        }
        return;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_must_stay_inside() {
        let x = [0.0f32; 6];
        assert!(View::strided(&x, &[2, 3], &[3, 1], 0).is_ok());
        assert!(View::strided(&x, &[2, 3], &[3, 1], 1).is_err());
        assert!(View::strided(&x, &[3, 2], &[-2, -1], 5).is_ok());
        assert!(View::strided(&x, &[3, 2], &[-2, -1], 4).is_err());
        assert!(View::strided(&x, &[usize::MAX, 2], &[0, 1], 0).is_err());
        assert!(View::strided(&x, &[2, 2], &[isize::MAX, 1], 0).is_err());
        assert!(View::strided(&x, &[0, 2], &[isize::MAX, 1], 17).is_ok());
        assert!(View::new(&x, &[1; 9]).is_err());
        assert!(View::new(&x, &[usize::MAX, usize::MAX]).is_err());
    }

    #[test]
    fn outputs_must_not_overlap_themselves() {
        let mut o = [0.0f32; 12];
        assert!(ViewMut::strided(&mut o, &[3, 4], &[4, 1], 0).is_ok());
        assert!(ViewMut::strided(&mut o, &[4, 3], &[1, 4], 0).is_ok());
        assert!(ViewMut::strided(&mut o, &[3, 4], &[3, 1], 0).is_err());
        assert!(ViewMut::strided(&mut o, &[3, 4], &[0, 1], 0).is_err());
        assert!(ViewMut::strided(&mut o, &[1, 4], &[0, 1], 0).is_ok());
    }

    #[test]
    fn index_order_is_kept_by_every_view() {
        let x: Vec<f64> = (0..6).map(f64::from).collect();
        let v = View::new(&x, &[2, 3]).unwrap();
        assert_eq!(v.permute(&[1, 0]).unwrap().to_f64_vec(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!(v.narrow(1, 1, 2).unwrap().to_f64_vec(), [1.0, 2.0, 4.0, 5.0]);
        let row = View::new(&x[..3], &[3]).unwrap().broadcast(&[2, 3]).unwrap();
        assert_eq!(row.to_f64_vec(), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
        assert!(v.permute(&[0, 0]).is_err());
        assert!(v.narrow(2, 0, 1).is_err());
        assert!(v.reshape(&[3, 2]).is_ok() && v.permute(&[1, 0]).unwrap().reshape(&[6]).is_err());
    }
}
