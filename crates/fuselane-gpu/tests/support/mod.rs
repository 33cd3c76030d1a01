//! A GPU as a backend of the option matrix.

use fuselane::{
    Act, Angles, Cosine, CosineBackward, DType, Error, Normalize, NormalizeBackward,
    NormalizeForward, Result, Rotate, RotateBackward, Softmax, View, ViewMut,
};
use fuselane_check::{Backend, Effort, Operator, Selection, run_on};
use fuselane_gpu::{Device, Tensor, Tuning, act};

/// A device with its tuning. Every call uploads its views, outputs too, so that what was in them
/// is there to be overwritten, and downloads the outputs.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) name: String,
}

impl Gpu {
    /// The device that there is, tuned; `name` says how.
    pub(crate) fn new(name: &str, tuning: Tuning) -> Self {
        let device = Device::open().expect("a device").tuned(tuning);
        Self { device, name: name.into() }
    }

    fn input(&self, view: View<'_>) -> Result<Tensor> {
        self.device.upload(view)
    }

    /// Runs `call` on an output's copy there.
    fn output(
        &self,
        view: ViewMut<'_>,
        call: impl FnOnce(&mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut there = self.device.upload(view.as_view())?;
        call(&mut there)?;
        there.download_into(view)
    }
}

fn not_there_yet(operator: &'static str) -> Result<()> {
    Err(Error::new(operator, "kernel", "is not there yet", "one"))
}

impl Backend for Gpu {
    fn name(&self) -> &str {
        &self.name
    }

    fn supports(&self, dtype: DType) -> bool {
        self.device.supports(dtype)
    }

    fn act_forward(&self, act: Act, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let x = self.input(x)?;
        self.output(o, |o| act::forward_into(act, &x, o))
    }

    fn act_in_place(&self, act: Act, x: ViewMut<'_>) -> Result<()> {
        self.output(x, |x| act::forward_in_place(act, x))
    }

    fn act_backward(&self, act: Act, x: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let (x, grad) = (self.input(x)?, self.input(grad)?);
        self.output(dx, |dx| act::backward_into(act, &x, &grad, dx))
    }

    fn softmax_forward(&self, options: &Softmax, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let _ = (options, x, o);
        not_there_yet("softmax")
    }

    fn softmax_backward(
        &self,
        options: &Softmax,
        o: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _ = (options, o, grad, dx);
        not_there_yet("softmax")
    }

    fn softmax_backward_from_input(
        &self,
        options: &Softmax,
        x: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let _ = (options, x, grad, dx);
        not_there_yet("softmax")
    }

    fn normalize_forward(&self, options: &Normalize, call: NormalizeForward<'_>) -> Result<()> {
        let _ = (options, call);
        not_there_yet("normalize")
    }

    fn normalize_backward(&self, options: &Normalize, call: NormalizeBackward<'_>) -> Result<()> {
        let _ = (options, call);
        not_there_yet("normalize")
    }

    fn rotate_forward(
        &self,
        options: &Rotate<'_>,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        let _ = (options, x, angles, o);
        not_there_yet("rotate")
    }

    fn rotate_backward(&self, options: &Rotate<'_>, call: RotateBackward<'_>) -> Result<()> {
        let _ = (options, call);
        not_there_yet("rotate")
    }

    fn cosine_forward(
        &self,
        options: &Cosine<'_>,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        let _ = (options, x, angles, o);
        not_there_yet("cosine")
    }

    fn cosine_backward(&self, options: &Cosine<'_>, call: CosineBackward<'_>) -> Result<()> {
        let _ = (options, call);
        not_there_yet("cosine")
    }
}

/// Runs an operator's matrix on some tunings of the device, prints what came out, and asserts that
/// all of it is within its bounds.
pub(crate) fn check(operator: Operator, effort: Effort, tunings: &[(&str, Tuning)]) {
    let gpus: Vec<Gpu> = tunings.iter().map(|&(name, tuning)| Gpu::new(name, tuning)).collect();
    let backends: Vec<&dyn Backend> = gpus.iter().map(|gpu| gpu as &dyn Backend).collect();
    let selection = Selection { operators: vec![operator], effort, ..Selection::default() };
    println!("{:?}", gpus[0].device);
    let outcomes = run_on(&selection, &backends, &mut |_| {});
    assert!(!outcomes.is_empty());
    println!(
        "{:9} {:18} {:5} {:9} {:>9} {:>9} {:>9} {:>6} {:>11} {:>10}  case",
        "operator",
        "output",
        "dtype",
        "tuning",
        "ulp",
        "bound",
        "needed",
        "K",
        "compared",
        "inexact"
    );
    for outcome in &outcomes {
        println!(
            "{:9} {:18} {:5} {:9} {:9.4} {:9.4} {:9.3} {:6} {:11} {:10}  {}",
            outcome.operator,
            outcome.output,
            outcome.dtype,
            outcome.backend,
            outcome.worst,
            outcome.bound,
            outcome.needed,
            outcome.k,
            outcome.compared,
            outcome.inexact,
            outcome.case
        );
    }
    let broken: Vec<String> =
        outcomes.iter().filter(|o| !o.ok()).map(ToString::to_string).collect();
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}
