//! fuselane itself; and with an angle table that was made beforehand, as `fuselane_table`.

use fuselane::{
    Act, AngleTable, Angles, Buffer, CosineBackward, DType, NormalizeBackward, NormalizeForward,
    Residual, RotateBackward, Softmax,
};

use super::{Peer, sample};
use crate::case::{Mode, Operator};
use crate::protocol::{Alloc, Job, Sample};
use crate::tensor::Inputs;
use crate::worker::{Call, Fault, Library, Loaded};

pub(crate) struct Fuselane {
    /// Angles come from a table.
    pub(crate) table: bool,
}

impl Peer for Fuselane {
    fn name(&self) -> &'static str {
        if self.table { "fuselane_table" } else { "fuselane" }
    }

    fn applies(&self, operator: &Operator) -> bool {
        !self.table || matches!(operator, Operator::Cosine { .. })
    }

    fn memory_factor(&self) -> f64 {
        1.2
    }
}

impl Library for Fuselane {
    fn load(&self, job: &Job) -> Result<Box<dyn Loaded>, Fault> {
        let inputs = Inputs::read(job)?;
        let grid = job.operator.grid(job.n);
        Ok(Box::new(Prepared { job: job.clone(), inputs, grid, table: self.table }))
    }

    fn trim(&self) {
        fuselane::pool::trim();
    }
}

struct Prepared {
    job: Job,
    inputs: Inputs,
    /// The grid of a cosine encoding.
    grid: Vec<usize>,
    /// Angles come from a table, which is made before the call and counts as memory.
    table: bool,
}

impl Loaded for Prepared {
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault> {
        let table = match self.job.operator {
            Operator::Cosine { .. } if self.table => {
                let features = self.inputs.need("x")?.shape()[3];
                let theta = self.inputs.need("theta")?;
                Some(AngleTable::for_grid(theta, features, &self.grid, self.job.dtype.0)?)
            }
            _ => None,
        };
        let saved = Saved { table, o: None, statistics: None };
        let mut call = Ours { of: self, outputs: Vec::new(), saved };
        if self.job.mode == Mode::Bwd {
            let mut outputs = Vec::new();
            call.saved.statistics = self.forward(&call.saved, &mut outputs)?;
            call.saved.o = outputs.pop().map(|(_, o)| o);
        }
        Ok(Box::new(call))
    }
}

/// What there is besides inputs and outputs: a table, and what a backward needs of its forward.
struct Saved {
    table: Option<AngleTable>,
    o: Option<Buffer>,
    statistics: Option<Buffer>,
}

struct Ours<'a> {
    of: &'a Prepared,
    outputs: Vec<(&'static str, Buffer)>,
    saved: Saved,
}

impl Call for Ours<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        if self.of.job.alloc == Alloc::Fresh {
            // The pool, which is the library's default, takes them back and hands them out again.
            self.outputs.clear();
        }
        match self.of.job.mode {
            Mode::Fwd => self.of.forward(&self.saved, &mut self.outputs).map(drop),
            Mode::Bwd => self.of.backward(&self.saved, &mut self.outputs),
        }
    }

    fn sample(&self, output: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        sample(&self.of.job, &self.of.inputs, &self.outputs, output, samples)
    }
}

/// The output of a name, made where there is none yet.
fn output<'a>(
    outputs: &'a mut Vec<(&'static str, Buffer)>,
    name: &'static str,
    dtype: DType,
    shape: &[usize],
) -> Result<&'a mut Buffer, Fault> {
    let at = match outputs.iter().position(|(other, _)| *other == name) {
        Some(at) => at,
        None => {
            outputs.push((name, Buffer::unfilled(dtype, shape)?));
            outputs.len() - 1
        }
    };
    Ok(&mut outputs[at].1)
}

impl Prepared {
    fn angles<'a>(&'a self, saved: &'a Saved) -> Result<Angles<'a>, Fault> {
        match &saved.table {
            Some(table) => Ok(table.into()),
            None => Ok(self.inputs.need("theta")?.into()),
        }
    }

    /// Writes o, and gives the statistics of a norm.
    fn forward(
        &self,
        saved: &Saved,
        outputs: &mut Vec<(&'static str, Buffer)>,
    ) -> Result<Option<Buffer>, Fault> {
        let (x, dtype) = (self.inputs.need("x")?, self.job.dtype.0);
        let mut shape = x.shape().to_vec();
        if let (Operator::Cosine { .. }, Some(last)) = (self.job.operator, shape.last_mut()) {
            *last *= 2;
        }
        if self.job.operator == (Operator::Act { act: Act::None }) {
            return Ok(None); // o is x
        }
        let o = output(outputs, "o", dtype, &shape)?.view_mut();
        let operator = self.job.operator;
        match operator {
            Operator::Act { act } => act.forward_into(x, o)?,
            Operator::Softmax { dim } => Softmax::over(dim).forward_into(x, o)?,
            Operator::Rotate { .. } => operator.rotate().forward_into(x, self.angles(saved)?, o)?,
            Operator::Cosine { .. } => {
                operator.cosine(&self.grid).forward_into(x, self.angles(saved)?, o)?;
            }
            Operator::Normalize { .. } => {
                let rows = [&shape[..shape.len() - 1], &[1]].concat();
                let mut rstd = Buffer::unfilled(DType::F32, &rows)?;
                operator.normalize().forward_into(NormalizeForward {
                    weight: self.inputs.get("weight"),
                    gate: self.inputs.get("gate"),
                    residual: self.inputs.get("residual").map_or(Residual::None, Residual::Add),
                    rstd: Some(rstd.view_mut()),
                    ..NormalizeForward::new(x, o)
                })?;
                return Ok(Some(rstd));
            }
        }
        Ok(None)
    }

    fn backward(
        &self,
        saved: &Saved,
        outputs: &mut Vec<(&'static str, Buffer)>,
    ) -> Result<(), Fault> {
        let (x, grad) = (self.inputs.need("x")?, self.inputs.need("grad")?);
        let (dtype, shape) = (self.job.dtype.0, x.shape().to_vec());
        if self.job.operator == (Operator::Act { act: Act::None }) {
            return Ok(()); // dx is grad
        }
        let missing = || Fault::Failed("the forward was not run".to_owned());
        if let Operator::Normalize { .. } = self.job.operator {
            let names: [(&'static str, &str, &[usize]); 3] = [
                ("dx", "x", &shape),
                ("dgate", "gate", &shape),
                ("dweight", "weight", &shape[shape.len() - 1..]),
            ];
            for (name, input, shape) in names {
                if self.inputs.get(input).is_some() {
                    output(outputs, name, dtype, shape)?;
                }
            }
            let rstd = saved.statistics.as_ref().ok_or_else(missing)?.view();
            let mut call = NormalizeBackward {
                weight: self.inputs.get("weight"),
                gate: self.inputs.get("gate"),
                residual: self.inputs.get("residual"),
                ..NormalizeBackward::new(grad, x, rstd)
            };
            for (name, buffer) in outputs {
                let view = Some(buffer.view_mut());
                match *name {
                    "dx" => call.dx = view,
                    "dgate" => call.dgate = view,
                    _ => call.dweight = view,
                }
            }
            return Ok(self.job.operator.normalize().backward_into(call)?);
        }
        let dx = output(outputs, "dx", dtype, &shape)?.view_mut();
        // A linear encoding does not need x.
        let linear = self.job.operator.fused_act() == Some(Act::None.into());
        let point = (!linear).then_some(x);
        let operator = self.job.operator;
        match operator {
            Operator::Act { act: Act::Sigmoid } => {
                let o = saved.o.as_ref().ok_or_else(missing)?.view();
                Act::Sigmoid.backward_from_output_into(o, grad, dx)?;
            }
            Operator::Act { act } => act.backward_into(x, grad, dx)?,
            Operator::Softmax { dim } => {
                let o = saved.o.as_ref().ok_or_else(missing)?.view();
                Softmax::over(dim).backward_into(o, grad, dx)?;
            }
            Operator::Rotate { .. } => operator.rotate().backward_into(RotateBackward {
                x: point,
                grad,
                angles: self.angles(saved)?,
                dx: Some(dx),
                dtheta: None,
            })?,
            Operator::Cosine { .. } => {
                operator.cosine(&self.grid).backward_into(CosineBackward {
                    x: point,
                    grad,
                    angles: self.angles(saved)?,
                    dx: Some(dx),
                    dtheta: None,
                })?;
            }
            Operator::Normalize { .. } => {}
        }
        Ok(())
    }
}
