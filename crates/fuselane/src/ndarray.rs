//! Views of `ndarray` arrays, and arrays over views and buffers; no element is copied.
//!
//! ```
//! use fuselane::{Act, View, ViewMut};
//! use ndarray::{Array2, array};
//!
//! let x = array![[-1.0f32, 2.0], [3.0, -4.0]];
//! let mut o = Array2::<f32>::zeros((2, 2));
//! Act::Relu.forward_into(View::try_from(&x)?, ViewMut::try_from(&mut o)?)?;
//! assert_eq!(o, array![[0.0, 2.0], [3.0, 0.0]]);
//!
//! // Any view: transposed, sliced, reversed. And a result as an array.
//! let o = Act::Relu.forward(View::try_from(x.slice(ndarray::s![..;-1, ..]))?)?;
//! assert_eq!(o.as_array::<f32>()?, array![[3.0, 0.0], [0.0, 2.0]].into_dyn());
//! # Ok::<(), fuselane::Error>(())
//! ```

use std::ptr::NonNull;

use ::ndarray::{
    ArrayBase, ArrayView, ArrayViewD, ArrayViewMut, ArrayViewMutD, Axis, Data, DataMut, Dimension,
    IxDyn, ShapeBuilder,
};

use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::pool::Buffer;
use crate::view::{View, ViewMut};

impl<'a, T: Element, D: Dimension> TryFrom<ArrayView<'a, T, D>> for View<'a> {
    type Error = Error;

    /// Fails where the array has more dimensions than [`MAX_RANK`](crate::MAX_RANK).
    fn try_from(array: ArrayView<'a, T, D>) -> Result<Self> {
        // SAFETY: ndarray's pointer is that of index 0, its strides are in elements, and the array
        // borrows all elements that they reach for 'a.
        unsafe { Self::from_raw(array.as_ptr().cast(), T::DTYPE, array.shape(), array.strides()) }
    }
}

impl<'a, T: Element, D: Dimension> TryFrom<ArrayViewMut<'a, T, D>> for ViewMut<'a> {
    type Error = Error;

    /// Fails where the array has more dimensions than [`MAX_RANK`](crate::MAX_RANK).
    fn try_from(mut array: ArrayViewMut<'a, T, D>) -> Result<Self> {
        let p = array.as_mut_ptr().cast();
        // SAFETY: as above, and the borrow, which the array gives up here, is exclusive.
        unsafe { Self::from_raw(p, T::DTYPE, array.shape(), array.strides()) }
    }
}

impl<'a, S: Data<Elem: Element>, D: Dimension> TryFrom<&'a ArrayBase<S, D>> for View<'a> {
    type Error = Error;

    /// Fails where the array has more dimensions than [`MAX_RANK`](crate::MAX_RANK).
    fn try_from(array: &'a ArrayBase<S, D>) -> Result<Self> {
        array.view().try_into()
    }
}

impl<'a, S: DataMut<Elem: Element>, D: Dimension> TryFrom<&'a mut ArrayBase<S, D>> for ViewMut<'a> {
    type Error = Error;

    /// Fails where the array has more dimensions than [`MAX_RANK`](crate::MAX_RANK).
    fn try_from(array: &'a mut ArrayBase<S, D>) -> Result<Self> {
        array.view_mut().try_into()
    }
}

impl<'a, T: Element> TryFrom<View<'a>> for ArrayViewD<'a, T> {
    type Error = Error;

    /// Fails where `T` is not the type of the elements.
    fn try_from(view: View<'a>) -> Result<Self> {
        let parts = Parts::new::<T>(&view)?;
        // SAFETY: the view holds all elements that its shape and strides reach, of type `T`, for
        // 'a; the strides of `Parts` are not negative, and 0 where no index uses them.
        let mut array = unsafe {
            let p = parts.first::<T>(view.as_ptr().cast_mut());
            ArrayView::from_shape_ptr(IxDyn(view.shape()).strides(IxDyn(&parts.strides)), p)
        };
        parts.reversed.iter().for_each(|&axis| array.invert_axis(axis));
        Ok(array)
    }
}

impl<'a, T: Element> TryFrom<ViewMut<'a>> for ArrayViewMutD<'a, T> {
    type Error = Error;

    /// Fails where `T` is not the type of the elements.
    fn try_from(mut view: ViewMut<'a>) -> Result<Self> {
        let parts = Parts::new::<T>(&view.as_view())?;
        let p = view.as_mut_ptr();
        // SAFETY: as above; and the elements, of which no two indices reach the same, are ours
        // alone, a borrow that the view gives up here.
        let mut array = unsafe {
            let p = parts.first::<T>(p);
            ArrayViewMut::from_shape_ptr(IxDyn(view.shape()).strides(IxDyn(&parts.strides)), p)
        };
        parts.reversed.iter().for_each(|&axis| array.invert_axis(axis));
        Ok(array)
    }
}

impl Buffer {
    /// The elements as an array, if `T` is their type. With the feature `ndarray`.
    ///
    /// ```
    /// use fuselane::{Buffer, DType};
    /// let buffer = Buffer::zeros(DType::F32, &[2, 3])?;
    /// assert_eq!(buffer.as_array::<f32>()?.shape(), [2, 3]);
    /// let owned = buffer.as_array::<f32>()?.to_owned(); // a copy that outlives the buffer
    /// assert_eq!(owned.sum(), 0.0);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn as_array<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        self.view().try_into()
    }

    /// The elements as an array to write, if `T` is their type. With the feature `ndarray`.
    ///
    /// ```
    /// use fuselane::{Buffer, DType};
    /// let mut buffer = Buffer::zeros(DType::F32, &[2])?;
    /// buffer.as_array_mut::<f32>()?[[1]] = 5.0;
    /// assert_eq!(buffer.as_slice::<f32>()?, [0.0, 5.0]);
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    pub fn as_array_mut<T: Element>(&mut self) -> Result<ArrayViewMutD<'_, T>> {
        self.view_mut().try_into()
    }
}

/// A layout as `ndarray` takes it: from the lowest address, strides not negative, and the axes to
/// turn round afterwards.
struct Parts {
    strides: Vec<usize>,
    reversed: Vec<Axis>,
    /// From the lowest address to index 0, in elements.
    skip: usize,
    is_empty: bool,
}

impl Parts {
    fn new<T: Element>(view: &View<'_>) -> Result<Self> {
        if view.dtype() != T::DTYPE {
            let expected = format!("{} (dtype of the view)", view.dtype());
            return Err(Error::new("view", "array", format!("is of {}", T::DTYPE), expected));
        }
        let mut parts =
            Self { strides: Vec::new(), reversed: Vec::new(), skip: 0, is_empty: view.is_empty() };
        for (axis, (&size, &stride)) in view.shape().iter().zip(view.strides()).enumerate() {
            if size <= 1 || parts.is_empty {
                parts.strides.push(0);
                continue;
            }
            parts.strides.push(stride.unsigned_abs());
            if stride < 0 {
                parts.reversed.push(Axis(axis));
                parts.skip += stride.unsigned_abs() * (size - 1);
            }
        }
        Ok(parts)
    }

    /// The lowest address.
    ///
    /// # Safety
    /// `index_0` is the address of index 0 of the view.
    unsafe fn first<T>(&self, index_0: *mut u8) -> *mut T {
        if self.is_empty {
            return NonNull::dangling().as_ptr(); // the address of an empty view may be anything
        }
        // SAFETY: the element that is last along each reversed axis lies there.
        unsafe { index_0.cast::<T>().sub(self.skip) }
    }
}

#[cfg(test)]
mod tests {
    use ::ndarray::{Array, Array2, Array3, ArrayD, array, s};
    use half::bf16;

    use super::*;
    use crate::{Act, DType};

    #[test]
    fn every_view_of_an_array_is_the_same_here() -> Result<()> {
        let x = Array3::from_shape_fn((3, 4, 5), |(i, j, k)| (100 * i + 10 * j + k) as f32);
        for view in [
            x.view(),
            x.view().permuted_axes([2, 0, 1]),
            x.slice(s![..;-1, 1..;2, ..;-2]),
            x.slice(s![1..2, ..;-1, 4..5]),
            x.slice(s![.., 2..2, ..]),
        ] {
            let ours = View::try_from(view)?;
            let wide: Vec<f64> = view.iter().map(|&v| f64::from(v)).collect();
            assert_eq!((ours.shape(), ours.to_f64_vec()), (view.shape(), wide));
            assert_eq!(ArrayViewD::<f32>::try_from(ours)?, view.into_dyn());
        }
        let row = array![1.0f64, 2.0];
        let wide = row.broadcast((3, 2)).unwrap();
        assert_eq!(View::try_from(wide)?.strides(), [0, 1]);
        assert_eq!(ArrayViewD::<f64>::try_from(View::try_from(wide)?)?, wide.into_dyn());
        assert_eq!(View::try_from(&::ndarray::arr0(7.0f32))?.to_f64_vec(), [7.0]);
        Ok(())
    }

    #[test]
    fn results_arrive_in_the_array() -> Result<()> {
        let x = Array2::from_shape_fn((6, 7), |(i, j)| bf16::from_f32(i as f32 - j as f32));
        let mut o = Array2::from_elem((6, 9), bf16::NAN);
        let slice = o.slice_mut(s![..;-1, 1..8]);
        Act::Relu.forward_into(View::try_from(&x)?, slice.try_into()?)?;
        for ((i, j), v) in o.indexed_iter() {
            match j {
                1..8 => assert_eq!(v.to_f32(), ((5 - i) as f32 - (j - 1) as f32).max(0.0)),
                _ => assert!(v.is_nan()),
            }
        }
        // And through a reversed view of ours.
        let mut view = ViewMut::try_from(o.slice_mut(s![..;-1, ..]))?;
        let mut back = ArrayViewMutD::<bf16>::try_from(view.reborrow())?;
        back[[0, 0]] = bf16::ONE;
        assert_eq!(o[[5, 0]], bf16::ONE);
        Ok(())
    }

    #[test]
    fn buffers_are_arrays() -> Result<()> {
        let mut buffer = Buffer::zeros(DType::F32, &[2, 3])?;
        buffer.as_array_mut::<f32>()?.assign(&array![[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]);
        let owned: ArrayD<f32> = buffer.as_array()?.to_owned();
        assert_eq!(owned.iter().copied().collect::<Vec<_>>(), buffer.to_vec::<f32>()?);
        let error = buffer.as_array::<bf16>().unwrap_err();
        assert_eq!(error.to_string(), "view: array is of bf16, expected f32 (dtype of the view)");
        assert!(Buffer::zeros(DType::F64, &[0, 3])?.as_array::<f64>()?.is_empty());
        Ok(())
    }

    #[test]
    fn too_many_dimensions_are_refused() {
        let x = Array::<f32, _>::zeros(IxDyn(&[1; 9]));
        assert_eq!(View::try_from(&x).unwrap_err().argument(), "shape");
        let mut x = x;
        assert_eq!(ViewMut::try_from(&mut x).err().unwrap().argument(), "shape");
    }
}
