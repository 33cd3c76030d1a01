//! A device as a backend of the option matrix in `fuselane-check`.

use fuselane::{
    Act, Angles, Cosine, CosineBackward, DType, Normalize, NormalizeBackward, NormalizeForward,
    Residual, Result, Rotate, RotateBackward, Softmax, View, ViewMut,
};
use fuselane_check::Backend;

use fuselane_gpu::{AngleTable, Device, Tensor, act, cosine, rotate, softmax};

/// A device for `fuselane_check::run_on`. Each call copies its operands to the device, with their
/// strides and with what their outputs hold, runs there, and copies the results back.
#[derive(Debug, Clone)]
pub struct CheckBackend {
    device: Device,
    name: String,
}

impl CheckBackend {
    /// Under the device's own name in outcomes.
    pub fn new(device: Device) -> Self {
        let name = device.name().to_owned();
        Self { device, name }
    }

    /// Under another name: for one device that is tuned in several ways.
    pub fn named(device: Device, name: impl Into<String>) -> Self {
        Self { device, name: name.into() }
    }

    fn input(&self, view: View<'_>) -> Result<Tensor> {
        self.device.upload(view)
    }

    fn optional(&self, view: Option<View<'_>>) -> Result<Option<Tensor>> {
        view.map(|view| self.input(view)).transpose()
    }

    fn output<'a>(&self, view: ViewMut<'a>) -> Result<Output<'a>> {
        Ok(Output { tensor: self.device.upload(view.as_view())?, view })
    }

    fn optional_output<'a>(&self, view: Option<ViewMut<'a>>) -> Result<Option<Output<'a>>> {
        view.map(|view| self.output(view)).transpose()
    }

    fn angles(&self, angles: Angles<'_>) -> Result<Uploaded> {
        Ok(match angles {
            Angles::Theta(theta) => Uploaded::Theta(self.input(theta)?),
            Angles::Table(table) => Uploaded::Table(AngleTable::upload(&self.device, table)?),
        })
    }
}

/// A result on the device, and where it goes on the host.
struct Output<'a> {
    tensor: Tensor,
    view: ViewMut<'a>,
}

impl Output<'_> {
    fn finish(self) -> Result<()> {
        self.tensor.download_into(self.view)
    }
}

fn tensor<'a>(output: &'a mut Option<Output<'_>>) -> Option<&'a mut Tensor> {
    output.as_mut().map(|output| &mut output.tensor)
}

fn finish_all<const N: usize>(outputs: [Option<Output<'_>>; N]) -> Result<()> {
    outputs.into_iter().flatten().try_for_each(Output::finish)
}

/// Angles on the device.
enum Uploaded {
    Theta(Tensor),
    Table(AngleTable),
}

impl Uploaded {
    fn angles(&self) -> fuselane_gpu::Angles<'_> {
        match self {
            Self::Theta(theta) => fuselane_gpu::Angles::Theta(theta),
            Self::Table(table) => fuselane_gpu::Angles::Table(table),
        }
    }
}

impl Backend for CheckBackend {
    fn name(&self) -> &str {
        &self.name
    }

    fn supports(&self, dtype: DType) -> bool {
        self.device.supports(dtype)
    }

    fn act_forward(&self, act: Act, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let (x, mut o) = (self.input(x)?, self.output(o)?);
        act::forward_into(act, &x, &mut o.tensor)?;
        o.finish()
    }

    fn act_in_place(&self, act: Act, x: ViewMut<'_>) -> Result<()> {
        let mut x = self.output(x)?;
        act::forward_in_place(act, &mut x.tensor)?;
        x.finish()
    }

    fn act_backward(&self, act: Act, x: View<'_>, grad: View<'_>, dx: ViewMut<'_>) -> Result<()> {
        let (x, grad, mut dx) = (self.input(x)?, self.input(grad)?, self.output(dx)?);
        act::backward_into(act, &x, &grad, &mut dx.tensor)?;
        dx.finish()
    }

    fn softmax_forward(&self, options: &Softmax, x: View<'_>, o: ViewMut<'_>) -> Result<()> {
        let (x, mut o) = (self.input(x)?, self.output(o)?);
        softmax::forward_into(options, &x, &mut o.tensor)?;
        o.finish()
    }

    fn softmax_backward(
        &self,
        options: &Softmax,
        o: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let (o, grad, mut dx) = (self.input(o)?, self.input(grad)?, self.output(dx)?);
        softmax::backward_into(options, &o, &grad, &mut dx.tensor)?;
        dx.finish()
    }

    fn softmax_backward_from_input(
        &self,
        options: &Softmax,
        x: View<'_>,
        grad: View<'_>,
        dx: ViewMut<'_>,
    ) -> Result<()> {
        let (x, grad, mut dx) = (self.input(x)?, self.input(grad)?, self.output(dx)?);
        softmax::backward_from_input_into(options, &x, &grad, &mut dx.tensor)?;
        dx.finish()
    }

    fn normalize_forward(&self, _: &Normalize, _: NormalizeForward<'_>) -> Result<()> {
        unreachable!()
    }
    fn normalize_backward(&self, _: &Normalize, _: NormalizeBackward<'_>) -> Result<()> {
        unreachable!()
    }
    fn rotate_forward(
        &self,
        options: &Rotate<'_>,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        let (x, angles, mut o) = (self.input(x)?, self.angles(angles)?, self.output(o)?);
        rotate::forward_into(options, &x, angles.angles(), &mut o.tensor)?;
        o.finish()
    }

    fn rotate_backward(&self, options: &Rotate<'_>, call: RotateBackward<'_>) -> Result<()> {
        let (x, grad) = (self.optional(call.x)?, self.input(call.grad)?);
        let angles = self.angles(call.angles)?;
        let mut dx = self.optional_output(call.dx)?;
        let mut dtheta = self.optional_output(call.dtheta)?;
        rotate::backward_into(
            options,
            rotate::RotateBackward {
                x: x.as_ref(),
                grad: &grad,
                angles: angles.angles(),
                dx: tensor(&mut dx),
                dtheta: tensor(&mut dtheta),
            },
        )?;
        finish_all([dx, dtheta])
    }

    fn cosine_forward(
        &self,
        options: &Cosine<'_>,
        x: View<'_>,
        angles: Angles<'_>,
        o: ViewMut<'_>,
    ) -> Result<()> {
        let (x, angles, mut o) = (self.input(x)?, self.angles(angles)?, self.output(o)?);
        cosine::forward_into(options, &x, angles.angles(), &mut o.tensor)?;
        o.finish()
    }

    fn cosine_backward(&self, options: &Cosine<'_>, call: CosineBackward<'_>) -> Result<()> {
        let (x, grad) = (self.optional(call.x)?, self.input(call.grad)?);
        let angles = self.angles(call.angles)?;
        let mut dx = self.optional_output(call.dx)?;
        let mut dtheta = self.optional_output(call.dtheta)?;
        cosine::backward_into(
            options,
            cosine::CosineBackward {
                x: x.as_ref(),
                grad: &grad,
                angles: angles.angles(),
                dx: tensor(&mut dx),
                dtheta: tensor(&mut dtheta),
            },
        )?;
        finish_all([dx, dtheta])
    }
}

use fuselane_check::{Effort, Operator, Selection, run_on};
use fuselane_gpu::Tuning;
fn check(operator: Operator, dtype: DType, every: usize, tuning: Tuning) {
    let device = Device::open().unwrap().tuned(tuning);
    let backend = CheckBackend::new(device);
    let selection = Selection {
        operators: vec![operator],
        dtypes: vec![dtype],
        effort: Effort::Every(every),
        ..Selection::default()
    };
    let start = std::time::Instant::now();
    let mut total = 0;
    let outcomes = run_on(&selection, &[&backend], &mut |p| total = p.total);
    println!("{operator} {dtype} {tuning:?}: {total} cases {:?}", start.elapsed());
    for o in &outcomes {
        println!(
            "{:9} {:18} {:5} {:9.4} {:9.4} need {:9.3} K {:6} {:8} {}",
            o.operator, o.output, o.dtype, o.worst, o.bound, o.needed, o.k, o.compared, o.case
        );
    }
    let broken: Vec<String> =
        outcomes.iter().filter(|o| !o.ok()).map(ToString::to_string).collect();
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
fn all(operator: Operator) {
    let every: usize = std::env::var("EVERY").ok().and_then(|v| v.parse().ok()).unwrap_or(101);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        check(operator, dtype, every, Tuning::default());
    }
    check(operator, DType::F32, every, Tuning { vector: Some(1), ..Tuning::default() });
    check(operator, DType::F32, every, Tuning { planes: Some(true), ..Tuning::default() });
    check(operator, DType::F32, every, Tuning { reread: Some(true), ..Tuning::default() });
}
#[test]
fn rotate_matrix() {
    all(Operator::Rotate);
}
#[test]
fn cosine_matrix() {
    all(Operator::Cosine);
}
