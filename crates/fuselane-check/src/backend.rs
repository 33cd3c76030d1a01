//! Who runs the calls of a case.

use fuselane::{
    Act, AngleTable, Angles, Cosine, CosineBackward, DType, Isa, Normalize, NormalizeBackward,
    NormalizeForward, Result, Rotate, RotateBackward, Softmax, View, ViewMut, with_isa,
};

/// Who runs the calls of a case: an instruction set of this CPU, or another device.
///
/// The functions are those `_into` calls of the operators that the matrix makes. Views are of this process's memory, so a
/// device copies inputs to itself and results back. What comes back as an error is a fault of the
/// case, since all cases are legal. Calls come from several threads at once.
pub trait Backend: Sync {
    /// The name in outcomes, as in `avx2`.
    fn name(&self) -> &str;

    /// Whether it has tensors of this dtype; by default it has all. A case is run on the backends
    /// that have the dtypes of all its tensors, activations, parameters and their gradients alike;
    /// others leave it out without a word. (Statistics and tables of angles are of the arithmetic
    /// type: f32, or f64 for f64 activations.)
    fn supports(&self, dtype: DType) -> bool {
        let _ = dtype;
        true
    }

    /// [`Act::forward_into`].
    fn act_forward(&self, act: Act, x: View, o: ViewMut) -> Result<()>;

    /// [`Act::forward_in_place`].
    fn act_in_place(&self, act: Act, x: ViewMut) -> Result<()>;

    /// [`Act::backward_into`].
    fn act_backward(&self, act: Act, x: View, grad: View, dx: ViewMut) -> Result<()>;

    /// [`Softmax::forward_into`].
    fn softmax_forward(&self, options: &Softmax, x: View, o: ViewMut) -> Result<()>;

    /// [`Softmax::backward_into`].
    fn softmax_backward(&self, options: &Softmax, o: View, grad: View, dx: ViewMut) -> Result<()>;

    /// [`Softmax::backward_from_input_into`].
    fn softmax_backward_from_input(
        &self,
        options: &Softmax,
        x: View,
        grad: View,
        dx: ViewMut,
    ) -> Result<()>;

    /// [`Normalize::forward_into`].
    fn normalize_forward(&self, options: &Normalize, call: NormalizeForward) -> Result<()>;

    /// [`Normalize::backward_into`].
    fn normalize_backward(&self, options: &Normalize, call: NormalizeBackward) -> Result<()>;

    /// [`Rotate::forward_into`].
    fn rotate_forward(&self, options: &Rotate, x: View, angles: Angles, o: ViewMut) -> Result<()>;

    /// [`Rotate::backward_into`].
    fn rotate_backward(&self, options: &Rotate, call: RotateBackward) -> Result<()>;

    /// [`Cosine::forward_into`].
    fn cosine_forward(&self, options: &Cosine, x: View, angles: Angles, o: ViewMut) -> Result<()>;

    /// [`Cosine::backward_into`].
    fn cosine_backward(&self, options: &Cosine, call: CosineBackward) -> Result<()>;

    /// A table, as `make` makes it; by default by this CPU, with its best instruction set.
    fn table(&self, make: &dyn Fn() -> Result<AngleTable>) -> Result<AngleTable> {
        make()
    }
}

/// An instruction set of this CPU, which has to be available.
///
/// ```
/// use fuselane::Isa;
/// use fuselane_check::{Backend, Cpu};
/// assert_eq!(Cpu(Isa::Portable).name(), "portable");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu(pub Isa);

impl Backend for Cpu {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn act_forward(&self, act: Act, x: View, o: ViewMut) -> Result<()> {
        with_isa(self.0, || act.forward_into(x, o))?
    }

    fn act_in_place(&self, act: Act, x: ViewMut) -> Result<()> {
        with_isa(self.0, || act.forward_in_place(x))?
    }

    fn act_backward(&self, act: Act, x: View, grad: View, dx: ViewMut) -> Result<()> {
        with_isa(self.0, || act.backward_into(x, grad, dx))?
    }

    fn softmax_forward(&self, options: &Softmax, x: View, o: ViewMut) -> Result<()> {
        with_isa(self.0, || options.forward_into(x, o))?
    }

    fn softmax_backward(&self, options: &Softmax, o: View, grad: View, dx: ViewMut) -> Result<()> {
        with_isa(self.0, || options.backward_into(o, grad, dx))?
    }

    fn softmax_backward_from_input(
        &self,
        options: &Softmax,
        x: View,
        grad: View,
        dx: ViewMut,
    ) -> Result<()> {
        with_isa(self.0, || options.backward_from_input_into(x, grad, dx))?
    }

    fn normalize_forward(&self, options: &Normalize, call: NormalizeForward) -> Result<()> {
        with_isa(self.0, || options.forward_into(call))?
    }

    fn normalize_backward(&self, options: &Normalize, call: NormalizeBackward) -> Result<()> {
        with_isa(self.0, || options.backward_into(call))?
    }

    fn rotate_forward(&self, options: &Rotate, x: View, angles: Angles, o: ViewMut) -> Result<()> {
        with_isa(self.0, || options.forward_into(x, angles, o))?
    }

    fn rotate_backward(&self, options: &Rotate, call: RotateBackward) -> Result<()> {
        with_isa(self.0, || options.backward_into(call))?
    }

    fn cosine_forward(&self, options: &Cosine, x: View, angles: Angles, o: ViewMut) -> Result<()> {
        with_isa(self.0, || options.forward_into(x, angles, o))?
    }

    fn cosine_backward(&self, options: &Cosine, call: CosineBackward) -> Result<()> {
        with_isa(self.0, || options.backward_into(call))?
    }

    fn table(&self, make: &dyn Fn() -> Result<AngleTable>) -> Result<AngleTable> {
        with_isa(self.0, make)?
    }
}

/// A backend, and its index among those of a run, by which the outcomes are sorted.
#[derive(Clone, Copy)]
pub(crate) struct Runner<'a> {
    pub(crate) index: usize,
    pub(crate) backend: &'a dyn Backend,
}
