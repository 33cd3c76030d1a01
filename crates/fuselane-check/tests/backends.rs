//! The matrix on backends other than an instruction set of this CPU.

use std::sync::atomic::{AtomicUsize, Ordering};

use fuselane::{
    Act, Angles, Cosine, CosineBackward, DType, Error, Isa, Normalize, NormalizeBackward,
    NormalizeForward, Residual, Result, Rotate, RotateBackward, Softmax, View, ViewMut,
};
use fuselane_check::{Backend, Cpu, Effort, Operator, Outcome, Selection, run, run_on};

/// A device without f64, which refuses to run `cosine`.
#[derive(Default)]
struct Device {
    calls: AtomicUsize,
}

const CPU: Cpu = Cpu(Isa::Portable);

impl Device {
    /// No tensor of f64 may come.
    fn count(&self, dtypes: &[Option<DType>]) {
        assert!(!dtypes.contains(&Some(DType::F64)));
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

fn of_theta(angles: Angles) -> Option<DType> {
    match angles {
        Angles::Theta(theta) => Some(theta.dtype()),
        Angles::Table(_) => None,
    }
}

impl Backend for Device {
    fn name(&self) -> &str {
        "device"
    }

    fn supports(&self, dtype: DType) -> bool {
        dtype != DType::F64
    }

    fn act_forward(&self, act: Act, x: View, o: ViewMut) -> Result<()> {
        self.count(&[Some(x.dtype()), Some(o.dtype())]);
        CPU.act_forward(act, x, o)
    }

    fn act_in_place(&self, act: Act, x: ViewMut) -> Result<()> {
        self.count(&[Some(x.dtype())]);
        CPU.act_in_place(act, x)
    }

    fn act_backward(&self, act: Act, x: View, grad: View, dx: ViewMut) -> Result<()> {
        self.count(&[Some(x.dtype()), Some(grad.dtype())]);
        CPU.act_backward(act, x, grad, dx)
    }

    fn softmax_forward(&self, options: &Softmax, x: View, o: ViewMut) -> Result<()> {
        self.count(&[Some(x.dtype())]);
        CPU.softmax_forward(options, x, o)
    }

    fn softmax_backward(&self, options: &Softmax, o: View, grad: View, dx: ViewMut) -> Result<()> {
        self.count(&[Some(o.dtype())]);
        CPU.softmax_backward(options, o, grad, dx)
    }

    fn softmax_backward_from_input(
        &self,
        options: &Softmax,
        x: View,
        grad: View,
        dx: ViewMut,
    ) -> Result<()> {
        self.count(&[Some(x.dtype())]);
        CPU.softmax_backward_from_input(options, x, grad, dx)
    }

    fn normalize_forward(&self, options: &Normalize, call: NormalizeForward) -> Result<()> {
        let [weight, bias] = [call.weight, call.bias].map(|view| view.map(|view| view.dtype()));
        self.count(&[Some(call.x.dtype()), weight, bias]);
        // It adds the residual wrongly: not at all.
        let residual = match call.residual {
            Residual::Add(_) => Residual::None,
            other => other,
        };
        CPU.normalize_forward(options, NormalizeForward { residual, ..call })
    }

    fn normalize_backward(&self, options: &Normalize, call: NormalizeBackward) -> Result<()> {
        let dweight = call.dweight.as_ref().map(ViewMut::dtype);
        self.count(&[Some(call.x.dtype()), dweight, call.dbias.as_ref().map(ViewMut::dtype)]);
        CPU.normalize_backward(options, call)
    }

    fn rotate_forward(&self, options: &Rotate, x: View, angles: Angles, o: ViewMut) -> Result<()> {
        self.count(&[Some(x.dtype()), of_theta(angles)]);
        CPU.rotate_forward(options, x, angles, o)
    }

    fn rotate_backward(&self, options: &Rotate, call: RotateBackward) -> Result<()> {
        let dtheta = call.dtheta.as_ref().map(ViewMut::dtype);
        self.count(&[Some(call.grad.dtype()), of_theta(call.angles), dtheta]);
        CPU.rotate_backward(options, call)
    }

    fn cosine_forward(&self, _: &Cosine, _: View, _: Angles, _: ViewMut) -> Result<()> {
        Err(Error::new("cosine", "device", "has no such kernel", "one"))
    }

    fn cosine_backward(&self, _: &Cosine, _: CosineBackward) -> Result<()> {
        Err(Error::new("cosine", "device", "has no such kernel", "one"))
    }
}

#[test]
fn a_device_is_checked_like_an_instruction_set() {
    let selection = Selection { effort: Effort::Every(211), ..Selection::default() };
    let device = Device::default();
    let outcomes = run_on(&selection, &[&CPU, &device], &mut |_| {});
    assert!(device.calls.into_inner() > 0);
    let of = |name: &str, operator: Operator| -> Vec<&Outcome> {
        outcomes.iter().filter(|o| o.backend == name && o.operator == operator).collect()
    };
    for operator in Operator::ALL {
        let cpu = of("portable", operator);
        assert!(DType::ALL.iter().all(|dtype| cpu.iter().any(|o| o.dtype == *dtype)));
        assert!(cpu.iter().all(|outcome| outcome.ok()));
        let device = of("device", operator);
        assert!(!device.is_empty() && device.iter().all(|o| o.dtype != DType::F64));
        let fine = device.iter().all(|outcome| outcome.ok());
        assert_eq!(fine, !matches!(operator, Operator::Normalize | Operator::Cosine));
    }
    let refused = of("device", Operator::Cosine);
    assert!(refused.iter().all(|o| o.compared == 0 && o.to_string().contains("no such kernel")));
    // Results of the same code are the same, but parameters of f64 are left out.
    for (cpu, device) in of("portable", Operator::Softmax)
        .iter()
        .filter(|outcome| outcome.dtype != DType::F64)
        .zip(of("device", Operator::Softmax))
    {
        assert_eq!((cpu.output, cpu.dtype), (device.output, device.dtype));
        assert_eq!((cpu.worst, cpu.compared), (device.worst, device.compared));
    }
    let compared = |name| -> usize {
        let of = of(name, Operator::Rotate);
        of.iter().filter(|o| o.dtype != DType::F64).map(|o| o.compared).sum()
    };
    assert!(compared("device") < compared("portable"));
}

#[test]
fn steps_thin_the_matrix() {
    let compared = |effort| -> usize {
        let (operators, dtypes) = (vec![Operator::Softmax], vec![DType::F32]);
        let selection = Selection { operators, dtypes, isas: vec![Isa::Portable], effort };
        run(&selection, &mut |_| {}).iter().map(|outcome| outcome.compared).sum()
    };
    let full = compared(Effort::Full);
    assert_eq!(compared(Effort::Quick), compared(Effort::Every(23)));
    assert_eq!((compared(Effort::Every(1)), compared(Effort::Every(0))), (full, full));
    assert!(compared(Effort::Every(101)) < compared(Effort::Every(23)));
}
