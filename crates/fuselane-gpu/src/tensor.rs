//! Memory of a device, with shape and strides.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

use cubecl::server::Handle;
use fuselane::{DType, Element, Error, Result, View, ViewMut};

use crate::device::{Device, Target};

/// A tensor in a device's memory: a buffer with dtype, shape and strides.
///
/// A clone is another view of the same memory, and so are the results of [`Tensor::permute`] and
/// [`Tensor::narrow`].
///
/// ```no_run
/// use fuselane::{Act, View};
/// use fuselane_gpu::{Device, act};
/// let device = Device::open()?;
/// let x = device.upload(View::new(&[-1.0f32, 2.0], &[2])?)?;
/// assert_eq!(act::forward(Act::Relu, &x)?.download::<f32>()?, [0.0, 2.0]);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    device: Device,
    handle: Handle,
    /// Numbers in the buffer.
    len: usize,
    /// Where the buffer would lie if those of all devices were one memory: overlaps of arguments
    /// are found by it.
    address: usize,
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
}

/// The next address to hand out.
static ADDRESS: AtomicUsize = AtomicUsize::new(1 << 20);
/// Buffers are a multiple of this long, and their addresses too, so that a buffer of numbers can
/// be read in whole vectors.
const ALIGN: usize = 64;

impl Device {
    /// Copies a view to the device. Its strides are preserved, and with them gaps and repetitions.
    pub fn upload(&self, view: View<'_>) -> Result<Tensor> {
        let strides = forward_strides(&view)?;
        let size = view.dtype().size();
        let len = reach(view.shape(), &strides);
        let mut bytes = vec![0u8; padded(len * size)];
        for_each_run(view.shape(), &strides, &strides, |from, to, run| {
            // SAFETY: the view holds the elements of this run, and the span of all elements is as
            // long as `bytes`.
            unsafe {
                let from = view.as_ptr().add(from * size);
                let to = bytes.as_mut_ptr().add(to * size);
                std::ptr::copy_nonoverlapping(from, to, run * size);
            }
        });
        let handle = match self.target() {
            Target::Client(client) => client.create_from_slice(&bytes),
            #[cfg(feature = "sources")]
            Target::Recorder(_) => unbacked(bytes.len()),
        };
        Ok(self.tensor(handle, len, view.dtype(), view.shape().to_vec(), strides))
    }

    /// A tensor of which nothing was written yet.
    pub fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.check_dtype("tensor", "dtype", dtype)?;
        let product = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let fits = |len: &usize| *len <= isize::MAX as usize / 16;
        let Some(len) = product.filter(fits) else {
            let got = format!("{shape:?} overflows the address space");
            return Err(Error::new("tensor", "shape", got, "a product of dimensions that fits"));
        };
        let bytes = padded(len * dtype.size());
        let handle = match self.target() {
            Target::Client(client) => client.empty(bytes),
            #[cfg(feature = "sources")]
            Target::Recorder(_) => unbacked(bytes),
        };
        Ok(self.tensor(handle, len, dtype, shape.to_vec(), dense(shape)))
    }

    pub(crate) fn check_dtype(
        &self,
        operator: &'static str,
        argument: &'static str,
        dtype: DType,
    ) -> Result<()> {
        if self.supports(dtype) {
            return Ok(());
        }
        let supported: Vec<String> = DType::ALL
            .into_iter()
            .filter(|&dtype| self.supports(dtype))
            .map(|dtype| dtype.to_string())
            .collect();
        let expected = format!("{} ({} has no {dtype})", supported.join(", "), self.name());
        Err(Error::new(operator, argument, format!("is of {dtype}"), expected))
    }

    fn tensor(
        &self,
        handle: Handle,
        len: usize,
        dtype: DType,
        shape: Vec<usize>,
        strides: Vec<usize>,
    ) -> Tensor {
        let bytes = padded(len * dtype.size());
        let address = ADDRESS.fetch_add(bytes + ALIGN, Ordering::Relaxed);
        Tensor { device: self.clone(), handle, len, address, dtype, shape, strides, offset: 0 }
    }
}

impl Tensor {
    /// The device that it lies on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The step of each dimension, in elements.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether some dimension is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same memory with dimensions reordered: dimension `i` of the result is dimension
    /// `order[i]` of this tensor.
    pub fn permute(&self, order: &[usize]) -> Result<Self> {
        // The core checks the order.
        let view = self.view()?.permute(order)?;
        let shape = view.shape().to_vec();
        let strides = order.iter().map(|&dim| self.strides[dim]).collect();
        Ok(Self { shape, strides, ..self.clone() })
    }

    /// The part of dimension `dim` from `start`, `len` long.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let shape = self.view()?.narrow(dim, start, len)?.shape().to_vec();
        let skip = if len == 0 { 0 } else { start * self.strides[dim] };
        Ok(Self { shape, offset: self.offset + skip, ..self.clone() })
    }

    /// The same memory under another shape, in index order. The tensor has to be contiguous.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        let shape = self.view()?.reshape(shape)?.shape().to_vec();
        let strides = dense(&shape);
        Ok(Self { shape, strides, ..self.clone() })
    }

    /// The elements in index order.
    pub fn download<T: Element>(&self) -> Result<Vec<T>> {
        if T::DTYPE != self.dtype {
            let expected = format!("{} (its elements)", self.dtype);
            return Err(Error::new("tensor", "type", format!("is {}", T::DTYPE), expected));
        }
        let mut elements = vec![T::default(); self.len()];
        self.download_into(ViewMut::new(&mut elements, &self.shape)?)?;
        Ok(elements)
    }

    /// Copies the elements into the host's memory, which has the same shape and dtype.
    pub fn download_into(&self, mut view: ViewMut<'_>) -> Result<()> {
        if view.shape() != self.shape || view.dtype() != self.dtype {
            let got = format!("is {} {:?}", view.dtype(), view.shape());
            let expected = format!("{} {:?}", self.dtype, self.shape);
            return Err(Error::new("tensor", "view", got, expected));
        }
        if self.is_empty() {
            return Ok(());
        }
        let to_strides = forward_strides(&view.as_view())?;
        let Some(client) = self.device.client() else {
            return Err(Error::new("tensor", "device", "runs nothing", "one that does"));
        };
        let size = self.dtype.size();
        // The part of the buffer that the elements lie in.
        let first = self.offset * size / ALIGN * ALIGN;
        let end = (self.offset + reach(&self.shape, &self.strides)) * size;
        let after = (self.handle.size_in_used() as usize).saturating_sub(padded(end));
        let part = self.handle.clone().offset_start(first as u64).offset_end(after as u64);
        let bytes = client.read_one(part).map_err(|error| {
            Error::new("tensor", "memory", format!("cannot be read: {error}"), "a result")
        })?;
        let (bytes, to) = (&bytes[self.offset * size - first..], view.as_mut_ptr());
        for_each_run(&self.shape, &self.strides, &to_strides, |from, at, run| {
            let elements = &bytes[from * size..][..run * size];
            // SAFETY: the view holds the elements of this run, and is borrowed exclusively; the
            // slice has their bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(elements.as_ptr(), to.add(at * size), run * size);
            }
        });
        Ok(())
    }

    /// A view of memory that someone else has: a buffer of another user of CubeCL, as of burn's
    /// tensors, without a copy. The first element is number `offset` of the buffer; strides are in
    /// elements. A device without bf16 has two of them in each `u32`, the first one in the low half.
    ///
    /// ```no_run
    /// use fuselane::{Act, DType};
    /// use fuselane_gpu::{Device, Tensor, act};
    /// let device = Device::open()?;
    /// let client = device.client().expect("a device that runs");
    /// let handle = client.empty(1024 * 4); // or that of a burn `CubeTensor`, with its client
    /// // SAFETY: the buffer is of f32, and nothing else is written to it during the call.
    /// let x = unsafe { Tensor::from_handle(&device, handle, DType::F32, &[8, 128], &[128, 1], 0)? };
    /// let o = act::forward(Act::Silu, &x)?;
    /// let back = o.handle().clone(); // for the others again
    /// # Ok::<(), fuselane::Error>(())
    /// ```
    ///
    /// # Safety
    ///
    /// The buffer holds numbers of `dtype`. Where it, or a part of it, is seen through another
    /// tensor as well, no call may write to it through one and read or write it through the other:
    /// only views that come from one `Tensor` are known to overlap.
    pub unsafe fn from_handle(
        device: &Device,
        handle: Handle,
        dtype: DType,
        shape: &[usize],
        strides: &[usize],
        offset: usize,
    ) -> Result<Self> {
        device.check_dtype("tensor", "dtype", dtype)?;
        if device.client().is_some_and(|client| client.service_id() != handle.service) {
            let expected = format!("one of {}", device.name());
            return Err(Error::new("tensor", "handle", "is of another device", expected));
        }
        let begins = handle.offset_start.unwrap_or(0);
        if begins % 16 != 0 {
            let got = format!("begins at byte {begins}");
            let expected = "a multiple of 16; elements can be left out by `offset`";
            return Err(Error::new("tensor", "handle", got, expected));
        }
        if shape.len() != strides.len() {
            let got = format!("are {strides:?}");
            return Err(Error::new("tensor", "strides", got, format!("{} of them", shape.len())));
        }
        let len = usize::try_from(handle.size_in_used()).unwrap_or(usize::MAX) / dtype.size();
        let fits = checked_reach(shape, strides).and_then(|reach| reach.checked_add(offset));
        if fits.is_none_or(|end| end > len) {
            let got = format!("has {len} elements of {dtype}");
            let expected = format!("all of {shape:?} with strides {strides:?} from {offset}");
            return Err(Error::new("tensor", "handle", got, expected));
        }
        let tensor = device.tensor(handle, len, dtype, shape.to_vec(), strides.to_vec());
        Ok(Self { offset, ..tensor })
    }

    /// The buffer, for other users of CubeCL. The elements lie in it as [`Tensor::strides`] and
    /// [`Tensor::offset`] say.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Numbers in the buffer.
    pub(crate) fn buffer_len(&self) -> usize {
        self.len
    }

    /// Where index 0 lies in the buffer, in elements.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Whether the elements lie in index order, without gaps.
    pub(crate) fn is_dense(&self) -> bool {
        let mut next = 1;
        self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
            let fits = size == 1 || stride == next;
            next *= size;
            fits
        })
    }

    /// This tensor as the core's checks know it. Nobody may read through the view.
    pub(crate) fn view(&self) -> Result<View<'static>> {
        let (address, strides) = self.made_up();
        // SAFETY: the address is made up, and never read or written: these views stay within this
        // crate and go to the core's `check_...` functions, which look at shapes, strides and
        // addresses only.
        unsafe { View::from_raw(address as *const u8, self.dtype, &self.shape, &strides) }
    }

    /// The same for outputs.
    pub(crate) fn view_mut(&self) -> Result<ViewMut<'static>> {
        let (address, strides) = self.made_up();
        // SAFETY: as for `view`.
        unsafe { ViewMut::from_raw(address as *mut u8, self.dtype, &self.shape, &strides) }
    }

    fn made_up(&self) -> (usize, Vec<isize>) {
        let strides = self.strides.iter().map(|&stride| stride as isize).collect();
        (self.address.next_multiple_of(ALIGN) + self.offset * self.dtype.size(), strides)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensor")
            .field("dtype", &self.dtype)
            .field("shape", &self.shape)
            .field("strides", &self.strides)
            .finish_non_exhaustive()
    }
}

/// A buffer of a device that runs nothing.
#[cfg(feature = "sources")]
fn unbacked(bytes: usize) -> Handle {
    use cubecl_common::device::{DeviceId, ServiceId};
    struct Nowhere;
    let service =
        ServiceId { device: DeviceId::new(0, 0), service: std::any::TypeId::of::<Nowhere>() };
    Handle::new(service, cubecl_environment::stream::StreamId::current(), bytes as u64)
}

fn padded(bytes: usize) -> usize {
    bytes.max(1).next_multiple_of(ALIGN)
}

/// The strides of a tensor in index order without gaps.
pub(crate) fn dense(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// The strides of a view, none of which may be negative.
fn forward_strides(view: &View<'_>) -> Result<Vec<usize>> {
    let known = |&stride: &isize| {
        let expected = "none below 0 on a GPU";
        let got = || format!("are {:?}", view.strides());
        usize::try_from(stride).map_err(|_| Error::new("tensor", "strides", got(), expected))
    };
    view.strides().iter().map(known).collect()
}

/// [`reach`], where it does not overflow.
fn checked_reach(shape: &[usize], strides: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let steps = shape.iter().zip(strides).map(|(size, stride)| (size - 1).checked_mul(*stride));
    steps.into_iter().try_fold(1usize, |sum, step| sum.checked_add(step?))
}

/// Elements from the first to the last one that an index reaches.
fn reach(shape: &[usize], strides: &[usize]) -> usize {
    if shape.contains(&0) {
        return 0;
    }
    1 + shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>()
}

/// Calls `visit` with where each run of elements lies for each of two kinds of strides, and with its
/// length, in index order. The elements of a run lie without gaps for both.
fn for_each_run(
    shape: &[usize],
    from: &[usize],
    to: &[usize],
    mut visit: impl FnMut(usize, usize, usize),
) {
    if shape.contains(&0) {
        return;
    }
    let (mut run, mut outer) = (1, shape.len());
    while let Some(dim) = outer.checked_sub(1) {
        let dense = from[dim] == run && to[dim] == run;
        if shape[dim] > 1 && !dense {
            break;
        }
        run *= shape[dim];
        outer = dim;
    }
    let mut index = vec![0; outer];
    let (mut from_at, mut to_at) = (0, 0);
    loop {
        visit(from_at, to_at, run);
        let mut dim = outer;
        loop {
            let Some(next) = dim.checked_sub(1) else { return };
            dim = next;
            index[dim] += 1;
            from_at += from[dim];
            to_at += to[dim];
            if index[dim] < shape[dim] {
                break;
            }
            from_at -= index[dim] * from[dim];
            to_at -= index[dim] * to[dim];
            index[dim] = 0;
        }
    }
}
