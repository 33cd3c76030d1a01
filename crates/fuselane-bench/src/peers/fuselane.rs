//! fuselane itself; and with an angle table that was made beforehand, as `fuselane_table`.

use std::collections::BTreeMap;
use std::process::Command;

use fuselane::{
    Act, AngleTable, Angles, Buffer, Cosine, CosineBackward, DType, GatePosition, Normalize,
    NormalizeBackward, NormalizeForward, Positions, Residual, Rotate, RotateBackward, Softmax,
};

use super::{Peer, Start, own_worker};
use crate::case::{Gate, Mode, Operator};
use crate::protocol::{Alloc, Job, Sample};
use crate::tensor::{self, Inputs};
use crate::worker::{Call, Fault, Library, Loaded};

pub(crate) struct Fuselane {
    /// Angles come from a table.
    pub(crate) table: bool,
}

impl Peer for Fuselane {
    fn name(&self) -> &'static str {
        if self.table { "fuselane_table" } else { "fuselane" }
    }

    fn command(&self, start: Start) -> Result<Command, String> {
        own_worker(self.name(), start)
    }

    fn applies(&self, operator: &Operator) -> bool {
        !self.table || matches!(operator, Operator::Cosine { .. })
    }

    fn memory_factor(&self) -> f64 {
        1.2
    }
}

impl Library for Fuselane {
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            ("fuselane".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
            ("isa".to_owned(), fuselane::isa().name().to_owned()),
        ])
    }

    fn load(&self, job: &Job) -> Result<Box<dyn Loaded>, Fault> {
        let inputs = Inputs::read(job)?;
        let grid = match job.operator {
            Operator::Cosine { axes, .. } => vec![job.n; axes as usize],
            _ => Vec::new(),
        };
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
        let kept = Kept { table, o: None, statistics: None };
        let mut call = Ours { of: self, outputs: Vec::new(), kept };
        if self.job.mode == Mode::Bwd {
            let mut outputs = Vec::new();
            call.kept.statistics = self.forward(&call.kept, &mut outputs)?;
            call.kept.o = outputs.pop().map(|(_, o)| o);
        }
        Ok(Box::new(call))
    }
}

/// What there is besides inputs and outputs: a table, and what a backward needs of its forward.
struct Kept {
    table: Option<AngleTable>,
    o: Option<Buffer>,
    statistics: Option<Buffer>,
}

struct Ours<'a> {
    of: &'a Prepared,
    outputs: Vec<(&'static str, Buffer)>,
    kept: Kept,
}

impl Call for Ours<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        if self.of.job.alloc == Alloc::Fresh {
            // The pool, which is the library's default, takes them back and hands them out again.
            self.outputs.clear();
        }
        match self.of.job.mode {
            Mode::Fwd => self.of.forward(&self.kept, &mut self.outputs).map(drop),
            Mode::Bwd => self.of.backward(&self.kept, &mut self.outputs),
        }
    }

    fn sample(&self, output: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        match self.outputs.iter().find(|(name, _)| *name == output) {
            Some((_, buffer)) => tensor::sample(buffer, samples),
            // The identity gives back what it was given.
            None if self.of.job.operator == (Operator::Act { act: Act::None }) => {
                let name = if output == "o" { "x" } else { "grad" };
                self.of.inputs.sample(name, samples)
            }
            None => Err(Fault::Failed(format!("there is no output {output}"))),
        }
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
    fn angles<'a>(&'a self, kept: &'a Kept) -> Result<Angles<'a>, Fault> {
        match &kept.table {
            Some(table) => Ok(table.into()),
            None => Ok(self.inputs.need("theta")?.into()),
        }
    }

    fn rotate(&self) -> Rotate<'_> {
        Rotate { act: self.job.operator.fused_act().unwrap_or_default(), ..Rotate::default() }
    }

    fn cosine(&self, extra: usize) -> Cosine<'_> {
        Cosine {
            act: self.job.operator.fused_act().unwrap_or_default(),
            positions: Positions::Grid(&self.grid),
            extra_tokens: extra,
            ..Cosine::default()
        }
    }

    /// Writes o, and gives the statistics of a norm.
    fn forward(
        &self,
        kept: &Kept,
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
        match self.job.operator {
            Operator::Act { act } => act.forward_into(x, o)?,
            Operator::Softmax { dim } => Softmax::over(dim).forward_into(x, o)?,
            Operator::Rotate { .. } => self.rotate().forward_into(x, self.angles(kept)?, o)?,
            Operator::Cosine { extra, .. } => {
                self.cosine(extra).forward_into(x, self.angles(kept)?, o)?;
            }
            Operator::Normalize { .. } => {
                let rows = [&shape[..shape.len() - 1], &[1]].concat();
                let mut rstd = Buffer::unfilled(DType::F32, &rows)?;
                self.normalize().forward_into(NormalizeForward {
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

    fn normalize(&self) -> Normalize {
        let Operator::Normalize { gate, gate_act, eps, .. } = self.job.operator else {
            return Normalize::default();
        };
        Normalize {
            eps,
            gate_act,
            gate_position: match gate {
                Some(Gate::Post) => GatePosition::Post,
                Some(Gate::Pre) | None => GatePosition::Pre,
            },
            ..Normalize::default()
        }
    }

    fn backward(
        &self,
        kept: &Kept,
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
            let rstd = kept.statistics.as_ref().ok_or_else(missing)?.view();
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
            return Ok(self.normalize().backward_into(call)?);
        }
        let dx = output(outputs, "dx", dtype, &shape)?.view_mut();
        // A linear encoding does not need x.
        let linear = self.job.operator.fused_act() == Some(Act::None.into());
        let point = (!linear).then_some(x);
        match self.job.operator {
            Operator::Act { act: Act::Sigmoid } => {
                let o = kept.o.as_ref().ok_or_else(missing)?.view();
                Act::Sigmoid.backward_from_output_into(o, grad, dx)?;
            }
            Operator::Act { act } => act.backward_into(x, grad, dx)?,
            Operator::Softmax { dim } => {
                let o = kept.o.as_ref().ok_or_else(missing)?.view();
                Softmax::over(dim).backward_into(o, grad, dx)?;
            }
            Operator::Rotate { .. } => self.rotate().backward_into(RotateBackward {
                x: point,
                grad,
                angles: self.angles(kept)?,
                dx: Some(dx),
                dtheta: None,
            })?,
            Operator::Cosine { extra, .. } => {
                self.cosine(extra).backward_into(CosineBackward {
                    x: point,
                    grad,
                    angles: self.angles(kept)?,
                    dx: Some(dx),
                    dtheta: None,
                })?;
            }
            Operator::Normalize { .. } => {}
        }
        Ok(())
    }
}
