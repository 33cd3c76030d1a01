//! candle's own operations. Where candle has a fused one, the forward is that; fused ones have no
//! backward in candle, so backwards come from the differentiable form that it has of each.
//!
//! ```text
//! act        relu, sigmoid, silu, tanh, gelu_erf, gelu
//! softmax    softmax_last_dim; softmax for other dimensions and for backwards
//! normalize  +, *, rms_norm; rms_norm_slow for backwards
//! rotate     rope; rope_slow for backwards
//! cosine     two products and cat
//! ```
//!
//! The tables of cosines and sines are made when inputs are loaded, as candle's models do it, and
//! have the activations' dtype, as `rope` wants them. It has no frequencies per head, so the heads
//! of each token are passed to it as tokens of their own, which is only another shape.
//!
//! candle starts a backward from ones. So the forward ends with a product of o and the gradient,
//! and the backward begins with that of the product, which is part of its time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;

use candle_core::{D, DType, Device, Tensor, Var};
use candle_nn::{ops, rotary_emb};
use fuselane::{Act, Buffer, FusedAct, View};

use super::super::tables::Tables;
use super::Candle;
use crate::case::{Gate, Mode, Operator};
use crate::protocol::{Input, Job, Sample};
use crate::worker::{Call, Fault, Library, Loaded};

/// The versions that the manifest asks for; candle does not tell its own.
const VERSION: &str = "0.11";

impl From<candle_core::Error> for Fault {
    fn from(error: candle_core::Error) -> Self {
        match error {
            candle_core::Error::BackwardNotSupported { .. } => {
                Self::Unsupported("no backward in candle".to_owned())
            }
            error => Self::Failed(error.to_string()),
        }
    }
}

impl Library for Candle {
    fn versions(&self) -> BTreeMap<String, String> {
        let names = ["candle-core", "candle-nn"];
        names.map(|name| (name.to_owned(), VERSION.to_owned())).into()
    }

    fn load(&self, job: &Job) -> Result<Box<dyn Loaded>, Fault> {
        let mut inputs = BTreeMap::new();
        for input in &job.inputs {
            let mut tensor = read(input)?;
            let trained = ["x", "gate", "weight"].contains(&input.name.as_str());
            if job.mode == Mode::Bwd && trained {
                tensor = Var::from_tensor(&tensor)?.as_tensor().clone();
            }
            inputs.insert(input.name.clone(), tensor);
        }
        let prepared = Prepared { job: job.clone(), inputs };
        Ok(Box::new(prepared.with_tables()?))
    }
}

fn dtype_of(dtype: fuselane::DType) -> DType {
    match dtype {
        fuselane::DType::F32 => DType::F32,
        fuselane::DType::F16 => DType::F16,
        fuselane::DType::BF16 => DType::BF16,
        fuselane::DType::F64 => DType::F64,
    }
}

fn read(input: &Input) -> Result<Tensor, Fault> {
    let mut bytes = vec![0; input.shape.iter().product::<usize>() * input.dtype.0.size()];
    let read = File::open(&input.path).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| {
        Fault::Failed(format!("input {} ({}): {error}", input.name, input.path.display()))
    })?;
    Ok(Tensor::from_raw_buffer(&bytes, dtype_of(input.dtype.0), &input.shape, &Device::Cpu)?)
}

struct Prepared {
    job: Job,
    /// The inputs of the job, and with them what is made of them beforehand: `cos` and `sin`, and
    /// for a norm without a weight, ones.
    inputs: BTreeMap<String, Tensor>,
}

impl Loaded for Prepared {
    fn call(&self) -> Result<Box<dyn Call + '_>, Fault> {
        let mut product = None;
        if self.job.mode == Mode::Bwd && !self.is_identity() {
            product = Some((self.forward()? * self.need("grad")?)?);
        }
        Ok(Box::new(Graph { of: self, product, outputs: BTreeMap::new() }))
    }
}

struct Graph<'a> {
    of: &'a Prepared,
    /// What a backward starts from; it holds the graph of the forward.
    product: Option<Tensor>,
    outputs: BTreeMap<&'static str, Tensor>,
}

impl Call for Graph<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        self.outputs.clear();
        if self.of.job.mode == Mode::Fwd {
            self.outputs.insert("o", self.of.forward()?);
            return Ok(());
        }
        let Some(product) = &self.product else {
            self.outputs.insert("dx", self.of.need("grad")?.clone());
            return Ok(());
        };
        let mut gradients = product.backward()?;
        for (name, of) in [("dx", "x"), ("dgate", "gate"), ("dweight", "weight")] {
            let Some(input) = self.of.inputs.get(of).filter(|input| input.is_variable()) else {
                continue;
            };
            let gradient = gradients.remove(input);
            let missing = || Fault::Unsupported("no backward in candle".to_owned());
            self.outputs.insert(name, gradient.ok_or_else(missing)?);
        }
        Ok(())
    }

    fn sample(&self, output: &str, samples: &[Sample]) -> Result<Vec<f32>, Fault> {
        let tensor = self.outputs.get(output);
        let tensor = tensor.ok_or_else(|| Fault::Failed(format!("there is no {output}")))?;
        let flat = tensor.flatten_all()?;
        let mut picked = Vec::new();
        for sample in samples {
            for i in 0..sample.count {
                let part = flat.narrow(0, sample.start + i * sample.step, sample.length)?;
                picked.extend(part.to_dtype(DType::F32)?.to_vec1::<f32>()?);
            }
        }
        Ok(picked)
    }
}

impl Prepared {
    fn with_tables(mut self) -> Result<Self, Fault> {
        let x = self.need("x")?;
        match self.job.operator {
            Operator::Rotate { .. } | Operator::Cosine { .. } => {
                let theta = self.need("theta")?;
                let numbers = theta.flatten_all()?.to_vec1::<f32>()?;
                let theta = View::new(&numbers, theta.dims())?;
                let Tables { cos, sin } = Tables::new(&self.job, x.dims(), theta)?;
                let tables = [("cos", self.table(&cos)?), ("sin", self.table(&sin)?)];
                self.inputs.extend(tables.map(|(name, table)| (name.to_owned(), table)));
                fuselane::pool::trim();
            }
            Operator::Normalize { weight: false, .. } => {
                let ones = Tensor::ones(x.dim(D::Minus1)?, x.dtype(), x.device())?;
                self.inputs.insert("ones".to_owned(), ones);
            }
            _ => {}
        }
        Ok(self)
    }

    /// A table, in the shape that it is used in.
    fn table(&self, table: &Buffer) -> Result<Tensor, Fault> {
        let tensor = Tensor::from_slice(table.as_slice::<f32>()?, table.shape(), &Device::Cpu)?;
        let tensor = tensor.to_dtype(dtype_of(self.job.dtype.0))?;
        match self.job.operator {
            Operator::Rotate { .. } => Ok(tensor.flatten_to(1)?),
            _ => Ok(tensor),
        }
    }

    fn need(&self, name: &str) -> Result<&Tensor, Fault> {
        let input = self.inputs.get(name);
        input.ok_or_else(|| Fault::Failed(format!("the job has no input {name}")))
    }

    fn is_identity(&self) -> bool {
        self.job.operator == (Operator::Act { act: Act::None })
    }

    fn forward(&self) -> Result<Tensor, Fault> {
        let x = self.need("x")?;
        match self.job.operator {
            Operator::Act { act } => activate(act, x),
            Operator::Softmax { dim: -1 } => self.softmax(x, 3),
            Operator::Softmax { .. } => self.softmax(x, 2),
            Operator::Normalize { .. } => self.normalize(x),
            Operator::Rotate { .. } => {
                let x = self.act(x, 1)?;
                let (b, n, h, d) = x.dims4()?;
                let tokens = x.reshape((b, 1, n * h, d))?;
                let rope = match self.job.mode {
                    Mode::Fwd => rotary_emb::rope,
                    Mode::Bwd => rotary_emb::rope_slow,
                };
                let o = rope(&tokens, self.need("cos")?, self.need("sin")?)?;
                Ok(o.reshape((b, n, h, d))?)
            }
            Operator::Cosine { .. } => {
                let x = self.act(x, 2)?;
                let cos = x.broadcast_mul(self.need("cos")?)?;
                let sin = x.broadcast_mul(self.need("sin")?)?;
                Ok(Tensor::cat(&[cos, sin], D::Minus1)?)
            }
        }
    }

    fn softmax(&self, x: &Tensor, dim: usize) -> Result<Tensor, Fault> {
        Ok(match self.job.mode {
            Mode::Fwd if dim + 1 == x.rank() => ops::softmax_last_dim(x)?,
            _ => ops::softmax(x, dim)?,
        })
    }

    /// The activation of an encoding whose tokens are along dimension `sequence`.
    fn act(&self, x: &Tensor, sequence: usize) -> Result<Tensor, Fault> {
        match self.job.operator.fused_act().unwrap_or_default() {
            FusedAct::Elementwise(act) => activate(act, x),
            FusedAct::SoftmaxFeatures => self.softmax(x, 3),
            FusedAct::SoftmaxSequence => self.softmax(x, sequence),
        }
    }

    fn normalize(&self, x: &Tensor) -> Result<Tensor, Fault> {
        let Operator::Normalize { gate, gate_act, eps, .. } = self.job.operator else {
            return Err(Fault::Failed("not a norm".to_owned()));
        };
        let mut p = x.clone();
        if let Some(residual) = self.inputs.get("residual") {
            p = (p + residual)?;
        }
        let open = || activate(gate_act, self.need("gate")?);
        if gate == Some(Gate::Pre) {
            p = (p * open()?)?;
        }
        let weight = self.need("weight").or_else(|_| self.need("ones"))?;
        let o = match self.job.mode {
            Mode::Fwd => ops::rms_norm(&p, weight, eps as f32)?,
            Mode::Bwd => ops::rms_norm_slow(&p, weight, eps as f32)?,
        };
        Ok(if gate == Some(Gate::Post) { (o * open()?)? } else { o })
    }
}

fn activate(act: Act, x: &Tensor) -> Result<Tensor, Fault> {
    Ok(match act {
        Act::None => x.clone(),
        Act::Relu => x.relu()?,
        Act::Sigmoid => ops::sigmoid(x)?,
        Act::Silu => ops::silu(x)?,
        Act::Tanh => x.tanh()?,
        Act::Gelu => x.gelu_erf()?,
        Act::GeluTanh => x.gelu()?,
        Act::ReluSquared => x.relu()?.sqr()?,
        Act::Softplus => return Err(Fault::Unsupported("no softplus in candle".to_owned())),
    })
}

#[cfg(test)]
mod tests {
    use super::super::super::testing;
    use super::*;

    #[test]
    fn right_to_what_its_dtype_allows() {
        // Each step of its backwards is rounded to the dtype, and sums are added up in it.
        testing::check(&Candle, |_| true, |_| 64.0, |_, _| false);
    }
}
