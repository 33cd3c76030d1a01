//! What is measured, as data: the case files in `cases/`, and those that a user adds.
//!
//! A case is one operator with its options and shape, over several sizes `n`. It has a table for
//! each metric (speed, memory) and mode (fwd, bwd), whose name comes from the case's template.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use fuselane::{Act, Cosine, DType, FusedAct, GatePosition, Normalize, Positions, Rotate};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The case files that ship with the program, by name.
const FILES: [(&str, &str); 5] = [
    ("act.toml", include_str!("../cases/act.toml")),
    ("srmsnorm.toml", include_str!("../cases/srmsnorm.toml")),
    ("normalize_with_gate.toml", include_str!("../cases/normalize_with_gate.toml")),
    ("lrpe_rotate.toml", include_str!("../cases/lrpe_rotate.toml")),
    ("md_lrpe_cosine.toml", include_str!("../cases/md_lrpe_cosine.toml")),
];

/// What a table shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Metric {
    Speed,
    Memory,
}

impl Metric {
    pub(crate) const ALL: [Self; 2] = [Self::Speed, Self::Memory];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Speed => "speed",
            Self::Memory => "memory",
        }
    }

    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Speed => "ms",
            Self::Memory => "MiB",
        }
    }
}

/// Forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    Fwd,
    Bwd,
}

impl Mode {
    pub(crate) const ALL: [Self; 2] = [Self::Fwd, Self::Bwd];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fwd => "fwd",
            Self::Bwd => "bwd",
        }
    }
}

/// Where the gate of a norm multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Gate {
    Pre,
    Post,
}

/// An operator with its options, as case files and workers have it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Operator {
    /// An activation of (batch, heads, n, features).
    Act {
        #[serde(with = "act_name")]
        act: Act,
    },
    /// A softmax of (batch, heads, n, features), over features (-1) or the sequence (-2).
    Softmax { dim: isize },
    /// A norm of (batch, n, features). Its scale is 1.
    Normalize {
        #[serde(default)]
        residual: bool,
        #[serde(default)]
        gate: Option<Gate>,
        #[serde(default = "sigmoid", with = "act_name")]
        gate_act: Act,
        #[serde(default = "yes")]
        weight: bool,
        #[serde(default = "eps")]
        eps: f64,
    },
    /// Rotary encoding of (batch, n, heads, features).
    Rotate {
        #[serde(default)]
        act: ActOrSoftmax,
        /// For softmax: features (-1) or the sequence (1).
        #[serde(default)]
        dim: Option<isize>,
    },
    /// Cosine encoding of (batch, heads, extra + n^axes, features).
    Cosine {
        axes: u32,
        #[serde(default)]
        extra: usize,
        #[serde(default)]
        act: ActOrSoftmax,
        /// For softmax: features (-1) or the sequence (-2).
        #[serde(default)]
        dim: Option<isize>,
    },
}

fn sigmoid() -> Act {
    Act::Sigmoid
}

fn yes() -> bool {
    true
}

fn eps() -> f64 {
    1e-5
}

impl Operator {
    /// The operator's name in the library.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Act { .. } => "act",
            Self::Softmax { .. } => "softmax",
            Self::Normalize { .. } => "normalize",
            Self::Rotate { .. } => "rotate",
            Self::Cosine { .. } => "cosine",
        }
    }

    /// What rotate or cosine apply first; `None` for the other operators.
    pub(crate) fn fused_act(&self) -> Option<FusedAct> {
        let (act, dim) = match *self {
            Self::Rotate { act, dim } | Self::Cosine { act, dim, .. } => (act, dim),
            _ => return None,
        };
        Some(match act {
            ActOrSoftmax::Act(act) => FusedAct::Elementwise(act),
            ActOrSoftmax::Softmax if dim == Some(-1) => FusedAct::SoftmaxFeatures,
            ActOrSoftmax::Softmax => FusedAct::SoftmaxSequence,
        })
    }

    /// The library's options of a norm; the defaults for the other operators.
    pub(crate) fn normalize(&self) -> Normalize {
        let Self::Normalize { gate, gate_act, eps, .. } = *self else {
            return Normalize::default();
        };
        let gate_position = match gate {
            Some(Gate::Post) => GatePosition::Post,
            Some(Gate::Pre) | None => GatePosition::Pre,
        };
        Normalize { eps, gate_act, gate_position, ..Normalize::default() }
    }

    /// The library's options of a rotary encoding.
    pub(crate) fn rotate(&self) -> Rotate<'static> {
        Rotate { act: self.fused_act().unwrap_or_default(), ..Rotate::default() }
    }

    /// The grid of a cosine encoding whose axes have this length; empty for the other operators.
    pub(crate) fn grid(&self, n: usize) -> Vec<usize> {
        match self {
            Self::Cosine { axes, .. } => vec![n; *axes as usize],
            _ => Vec::new(),
        }
    }

    /// The library's options of a cosine encoding.
    pub(crate) fn cosine<'a>(&self, grid: &'a [usize]) -> Cosine<'a> {
        let extra_tokens = if let Self::Cosine { extra, .. } = *self { extra } else { 0 };
        let act = self.fused_act().unwrap_or_default();
        Cosine { act, positions: Positions::Grid(grid), extra_tokens, ..Cosine::default() }
    }

    fn check(&self) -> Result<(), String> {
        let (softmax, dim, sequence) = match *self {
            Self::Act { .. } | Self::Normalize { .. } => return Ok(()),
            Self::Softmax { dim } => (true, Some(dim), -2),
            Self::Rotate { act, dim } => (act == ActOrSoftmax::Softmax, dim, 1),
            Self::Cosine { axes, act, dim, .. } => {
                if !(1..=4).contains(&axes) {
                    return Err(format!("cosine: axes is {axes}, expected 1 to 4"));
                }
                (act == ActOrSoftmax::Softmax, dim, -2)
            }
        };
        match (softmax, dim) {
            (false, None) => Ok(()),
            (false, Some(_)) => Err(format!("{}: dim goes with softmax only", self.name())),
            (true, Some(dim)) if dim == -1 || dim == sequence => Ok(()),
            (true, other) => {
                let came = other.map_or("missing".to_owned(), |dim| dim.to_string());
                Err(format!("{}: dim is {came}, expected -1 or {sequence}", self.name()))
            }
        }
    }
}

/// An activation by its name.
mod act_name {
    use super::*;

    pub(super) fn serialize<S: Serializer>(act: &Act, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(act.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Act, D::Error> {
        let name = String::deserialize(deserializer)?;
        find(&name).map_err(serde::de::Error::custom)
    }

    pub(super) fn find(name: &str) -> Result<Act, String> {
        let found = Act::ALL.into_iter().find(|act| act.name() == name);
        found.ok_or_else(|| {
            let names = Act::ALL.map(Act::name).join(", ");
            format!("unknown activation {name:?}, expected one of {names}")
        })
    }
}

/// An elementwise activation, or a softmax.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActOrSoftmax {
    Act(Act),
    Softmax,
}

impl Default for ActOrSoftmax {
    fn default() -> Self {
        Self::Act(Act::None)
    }
}

impl Serialize for ActOrSoftmax {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(match self {
            Self::Act(act) => act.name(),
            Self::Softmax => "softmax",
        })
    }
}

impl<'de> Deserialize<'de> for ActOrSoftmax {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        match name.as_str() {
            "softmax" => Ok(Self::Softmax),
            name => act_name::find(name).map(Self::Act).map_err(serde::de::Error::custom),
        }
    }
}

/// A dtype that tensors on files may have, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Dtype(pub(crate) DType);

impl FromStr for Dtype {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = [DType::BF16, DType::F16, DType::F32];
        let found = known.into_iter().find(|dtype| dtype.name() == name);
        found.map(Self).ok_or_else(|| format!("unknown dtype {name:?}, expected bf16, f16 or f32"))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.0.name())
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.0.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One operator over several sizes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Case {
    /// The case file's family.
    pub(crate) family: String,
    /// The template of its tables' names.
    table: String,
    /// What it is, in words.
    pub(crate) title: String,
    pub(crate) operator: Operator,
    /// All sizes, and those of a quick run.
    pub(crate) sizes: Vec<usize>,
    pub(crate) quick: Vec<usize>,
    pub(crate) batch: usize,
    pub(crate) heads: usize,
    pub(crate) dim: usize,
    pub(crate) dtype: Dtype,
}

/// A tensor of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorSpec {
    pub(crate) name: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

impl TensorSpec {
    fn new(name: &'static str, shape: &[usize], dtype: DType) -> Self {
        Self { name, shape: shape.to_vec(), dtype }
    }

    pub(crate) fn len(&self) -> usize {
        self.shape.iter().product()
    }

    pub(crate) fn bytes(&self) -> u64 {
        (self.len() * self.dtype.size()) as u64
    }

    /// Whether its bytes can be counted, several times over.
    fn is_countable(&self) -> bool {
        let bytes = self.shape.iter().try_fold(64usize, |bytes, &length| bytes.checked_mul(length));
        bytes.is_some()
    }
}

/// The sum of the tensors' bytes.
pub(crate) fn bytes_of(tensors: &[TensorSpec]) -> u64 {
    tensors.iter().map(TensorSpec::bytes).sum()
}

impl Case {
    /// The name of one of its tables.
    pub(crate) fn table(&self, metric: Metric, mode: Mode, dtype: DType) -> String {
        self.table
            .replace("{metric}", metric.name())
            .replace("{mode}", mode.name())
            .replace("{dtype}", dtype.name())
    }

    /// The same with one head. The batch stays: angles are shared over it, so that a call with
    /// less of it would be another computation.
    pub(crate) fn small(&self) -> Self {
        Self { heads: 1, ..self.clone() }
    }

    /// Axes of its grid of tokens, of which n is the length.
    pub(crate) fn axes(&self) -> u32 {
        match self.operator {
            Operator::Cosine { axes, .. } => axes,
            _ => 1,
        }
    }

    /// Tokens of a sequence at size n.
    pub(crate) fn tokens(&self, n: usize) -> usize {
        match self.operator {
            Operator::Cosine { axes, extra, .. } => extra.saturating_add(n.saturating_pow(axes)),
            _ => n,
        }
    }

    /// The shape of x at size n.
    pub(crate) fn shape(&self, n: usize) -> Vec<usize> {
        let (b, h, d, tokens) = (self.batch, self.heads, self.dim, self.tokens(n));
        match self.operator {
            Operator::Act { .. } | Operator::Softmax { .. } | Operator::Cosine { .. } => {
                vec![b, h, tokens, d]
            }
            Operator::Normalize { .. } => vec![b, tokens, d],
            Operator::Rotate { .. } => vec![b, tokens, h, d],
        }
    }

    /// The shape of theta, for those operators that have one.
    fn theta(&self) -> Option<[usize; 2]> {
        match self.operator {
            Operator::Rotate { .. } => Some([self.heads, self.dim / 2]),
            Operator::Cosine { axes, .. } => {
                Some([self.heads, self.dim.div_ceil(axes as usize).next_power_of_two()])
            }
            _ => None,
        }
    }

    /// What a call is given: for a backward, with the gradient of the output, last.
    pub(crate) fn inputs(&self, mode: Mode, n: usize, dtype: DType) -> Vec<TensorSpec> {
        let shape = self.shape(n);
        let mut inputs = vec![TensorSpec::new("x", &shape, dtype)];
        if let Operator::Normalize { residual, gate, weight, .. } = self.operator {
            if residual {
                inputs.push(TensorSpec::new("residual", &shape, dtype));
            }
            if gate.is_some() {
                inputs.push(TensorSpec::new("gate", &shape, dtype));
            }
            if weight {
                inputs.push(TensorSpec::new("weight", &[self.dim], dtype));
            }
        }
        if let Some(theta) = self.theta() {
            inputs.push(TensorSpec::new("theta", &theta, DType::F32));
        }
        if mode == Mode::Bwd {
            let o = self.outputs(Mode::Fwd, n, dtype).remove(0);
            inputs.push(TensorSpec { name: "grad", ..o });
        }
        inputs
    }

    /// What a call computes. The gradient of a residual has the values of dx, and is not named.
    pub(crate) fn outputs(&self, mode: Mode, n: usize, dtype: DType) -> Vec<TensorSpec> {
        let mut shape = self.shape(n);
        if mode == Mode::Fwd {
            if let (Operator::Cosine { .. }, Some(last)) = (self.operator, shape.last_mut()) {
                *last *= 2;
            }
            return vec![TensorSpec::new("o", &shape, dtype)];
        }
        let mut outputs = vec![TensorSpec::new("dx", &shape, dtype)];
        if let Operator::Normalize { gate, weight, .. } = self.operator {
            if gate.is_some() {
                outputs.push(TensorSpec::new("dgate", &shape, dtype));
            }
            if weight {
                outputs.push(TensorSpec::new("dweight", &[self.dim], dtype));
            }
        }
        outputs
    }

    /// What the forward has to keep for the backward beyond its inputs and its output: the
    /// statistics of a norm.
    fn statistics_bytes(&self, n: usize) -> u64 {
        match self.operator {
            Operator::Normalize { .. } => (self.batch * n * DType::F32.size()) as u64,
            _ => 0,
        }
    }

    /// Bytes that a call has to read and write, each once. Zero for the identity.
    pub(crate) fn moved_bytes(&self, mode: Mode, n: usize, dtype: DType) -> u64 {
        if matches!(self.operator, Operator::Act { act: Act::None }) {
            return 0;
        }
        let read: u64 = self
            .inputs(mode, n, dtype)
            .iter()
            // The gradient of a linear map does not need the point at which it is taken. (That of
            // softmax is counted with x; o in its place has the same size.)
            .filter(|input| mode == Mode::Fwd || input.name != "x" || !self.is_linear())
            .map(TensorSpec::bytes)
            .sum();
        read + bytes_of(&self.outputs(mode, n, dtype)) + self.statistics_bytes(n)
    }

    fn is_linear(&self) -> bool {
        self.operator.fused_act() == Some(FusedAct::Elementwise(Act::None))
    }

    /// The least that has to exist beyond the inputs at the peak. For a backward that includes
    /// the forward's output, which the next layer holds, and the statistics.
    pub(crate) fn least_extra_bytes(&self, mode: Mode, n: usize, dtype: DType) -> u64 {
        if matches!(self.operator, Operator::Act { act: Act::None }) {
            return 0;
        }
        let forward = bytes_of(&self.outputs(Mode::Fwd, n, dtype));
        match mode {
            Mode::Fwd => forward,
            Mode::Bwd => {
                forward + self.statistics_bytes(n) + bytes_of(&self.outputs(Mode::Bwd, n, dtype))
            }
        }
    }
}

/// A case file, as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    family: String,
    batch: usize,
    #[serde(default = "one")]
    heads: usize,
    dim: usize,
    #[serde(default = "bf16")]
    dtype: Dtype,
    #[serde(default)]
    sizes: Vec<usize>,
    #[serde(default)]
    quick: Vec<usize>,
    case: Vec<FileCase>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileCase {
    table: String,
    title: String,
    operator: Operator,
    batch: Option<usize>,
    heads: Option<usize>,
    dim: Option<usize>,
    dtype: Option<Dtype>,
    sizes: Option<Vec<usize>>,
    quick: Option<Vec<usize>>,
}

fn one() -> usize {
    1
}

fn bf16() -> Dtype {
    Dtype(DType::BF16)
}

/// The cases of one file's text. An error says what is wrong, and names the file.
fn parse(name: &str, text: &str) -> Result<Vec<Case>, String> {
    let file: File = toml::from_str(text).map_err(|error| format!("{name}: {error}"))?;
    let mut cases = Vec::new();
    for case in file.case {
        let fault = |what: &str| format!("{name}: case {:?}: {what}", case.table);
        case.operator.check().map_err(|what| fault(&what))?;
        for part in ["{metric}", "{mode}", "{dtype}"] {
            if !case.table.contains(part) {
                return Err(fault(&format!("table has no {part}")));
            }
        }
        let sizes = case.sizes.unwrap_or_else(|| file.sizes.clone());
        let mut quick = case.quick.unwrap_or_else(|| file.quick.clone());
        if quick.is_empty() {
            quick.extend(sizes.first());
        }
        if sizes.is_empty() || sizes.iter().chain(&quick).any(|&n| n == 0) {
            return Err(fault("sizes is empty or has a 0"));
        }
        let case = Case {
            family: file.family.clone(),
            title: case.title,
            operator: case.operator,
            batch: case.batch.unwrap_or(file.batch),
            heads: case.heads.unwrap_or(file.heads),
            dim: case.dim.unwrap_or(file.dim),
            dtype: case.dtype.unwrap_or(file.dtype),
            table: case.table,
            sizes,
            quick,
        };
        let fault = |what: &str| Err(format!("{name}: case {:?}: {what}", case.table));
        if case.batch == 0 || case.heads == 0 || case.dim == 0 {
            return fault("batch, heads or dim is 0");
        }
        if matches!(case.operator, Operator::Rotate { .. }) && case.dim % 2 == 1 {
            return fault("dim is odd, and a rotation takes pairs");
        }
        let largest = case.sizes.iter().chain(&case.quick).copied().max().unwrap_or(1);
        let shapes = case.outputs(Mode::Fwd, largest, DType::F32);
        if !shapes.iter().all(TensorSpec::is_countable) {
            return fault(&format!("n = {largest} is too large to count its bytes"));
        }
        cases.push(case);
    }
    Ok(cases)
}

/// The cases that ship with the program.
pub(crate) fn builtin() -> Result<Vec<Case>, String> {
    let mut cases = Vec::new();
    for (name, text) in FILES {
        cases.extend(parse(name, text)?);
    }
    Ok(cases)
}

/// The cases of a user's file.
pub(crate) fn read(path: &Path) -> Result<Vec<Case>, String> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|error| format!("{name}: {error}"))?;
    parse(&name, &text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published;
    use std::collections::BTreeSet;

    fn case(part: &str) -> Case {
        let matches = |case: &Case| case.table.contains(part);
        builtin().unwrap().into_iter().find(matches).unwrap()
    }

    /// The published tables, by name and with their sizes, are the program's tables.
    #[test]
    fn all_published_tables_are_there() {
        let mut ours = BTreeSet::new();
        for case in builtin().unwrap() {
            for metric in Metric::ALL {
                for mode in Mode::ALL {
                    let name = case.table(metric, mode, case.dtype.0);
                    ours.extend(case.sizes.iter().map(|&n| (name.clone(), n)));
                }
            }
            assert!(case.quick.iter().all(|n| case.sizes.contains(n)), "{}", case.table);
        }
        let theirs: BTreeSet<(String, usize)> = published::keys().collect();
        assert_eq!(ours, theirs);
        let names: BTreeSet<&str> = ours.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names.len(), ours.len()), (80, 544));
        for name in [
            "act-speed-fwd-batch12-head12-dim128-act_relu-bf16",
            "md_lrpe_cosine-memory-bwd-batch12-head12-dim128-bf16-2d-l10",
            "layernorm-speed-bwd-batch4-dim2048-use_residual_True-bf16",
        ] {
            assert!(names.contains(name), "{name}");
        }
    }

    #[test]
    fn shapes() {
        let cosine = case("2d-l10");
        assert_eq!(cosine.shape(16), [12, 12, 266, 128]);
        let inputs = cosine.inputs(Mode::Bwd, 16, DType::BF16);
        let shapes: Vec<(&str, &[usize])> =
            inputs.iter().map(|input| (input.name, &input.shape[..])).collect();
        assert_eq!(
            shapes,
            [("x", &[12, 12, 266, 128][..]), ("theta", &[12, 64]), ("grad", &[12, 12, 266, 256])]
        );
        assert_eq!(case("3d-l0").inputs(Mode::Fwd, 4, DType::BF16)[1].shape, [12, 64]);
        assert_eq!(case("lrpe_rotate").shape(7), [12, 7, 12, 128]);
        let gate = case("gate_pos_post");
        let names = |tensors: Vec<TensorSpec>| -> Vec<&str> {
            tensors.iter().map(|tensor| tensor.name).collect()
        };
        assert_eq!(names(gate.inputs(Mode::Bwd, 8, DType::F16)), ["x", "gate", "weight", "grad"]);
        assert_eq!(names(gate.outputs(Mode::Bwd, 8, DType::F16)), ["dx", "dgate", "dweight"]);
    }

    #[test]
    fn bytes() {
        let tensor = 12 * 12 * 256 * 128 * 2;
        let relu = case("act_relu");
        assert_eq!(relu.moved_bytes(Mode::Fwd, 256, DType::BF16), 2 * tensor);
        assert_eq!(relu.moved_bytes(Mode::Bwd, 256, DType::BF16), 3 * tensor);
        assert_eq!(relu.moved_bytes(Mode::Bwd, 256, DType::F32), 6 * tensor);
        assert_eq!(relu.least_extra_bytes(Mode::Fwd, 256, DType::BF16), tensor);
        assert_eq!(relu.least_extra_bytes(Mode::Bwd, 256, DType::BF16), 2 * tensor);
        let none = case("act-{metric}-{mode}-batch12-head12-dim128-act_none");
        assert_eq!(none.moved_bytes(Mode::Fwd, 256, DType::BF16), 0);
        assert_eq!(none.least_extra_bytes(Mode::Bwd, 256, DType::BF16), 0);
        // The gradient of a plain rotation needs no x; theta is read.
        let rotate = case("lrpe_rotate");
        assert_eq!(rotate.moved_bytes(Mode::Bwd, 256, DType::BF16), 2 * tensor + 12 * 64 * 4);
        let norm = case("use_residual_False");
        let row = 4 * 1024 * 2048 * 2;
        let (statistics, weight) = (4 * 1024 * 4, 2048 * 2);
        let moved = norm.moved_bytes(Mode::Bwd, 1024, DType::BF16);
        assert_eq!(moved, 3 * row + 2 * weight + statistics);
    }

    #[test]
    fn faults_name_file_and_case() {
        let head = "family = \"f\"\nbatch = 1\ndim = 8\nsizes = [4]\n[[case]]\n";
        let table = "table = \"t-{metric}-{mode}-{dtype}\"\ntitle = \"t\"\n";
        let with = |operator: &str| {
            parse("my.toml", &format!("{head}{table}operator = {{ {operator} }}\n"))
        };
        assert_eq!(with("op = \"rotate\"").unwrap()[0].quick, [4]);
        for (operator, part) in [
            ("op = \"act\", act = \"rulu\"", "rulu"),
            ("op = \"softmax\", dim = 3", "dim is 3, expected -1 or -2"),
            ("op = \"rotate\", act = \"softmax\"", "dim is missing"),
            ("op = \"rotate\", act = \"silu\", dim = 1", "softmax only"),
            ("op = \"cosine\", axes = 9", "axes is 9"),
            ("op = \"conv\"", "conv"),
            ("op = \"normalize\", gait = \"pre\"", "gait"),
        ] {
            let error = with(operator).unwrap_err();
            assert!(error.starts_with("my.toml") && error.contains(part), "{error}");
        }
        let error = parse(
            "my.toml",
            &format!("{head}table = \"t\"\ntitle = \"t\"\noperator = {{ op = \"rotate\" }}\n"),
        );
        assert!(error.unwrap_err().contains("no {metric}"));
        let odd = head.replace("dim = 8", "dim = 7");
        let operator = "operator = { op = \"rotate\" }\n";
        assert!(parse("f", &format!("{odd}{table}{operator}")).unwrap_err().contains("odd"));
        let huge = head.replace("[4]", "[576460752303423488]");
        assert!(parse("f", &format!("{huge}{table}{operator}")).unwrap_err().contains("too large"));
        let error = read(Path::new("/no such file.toml")).unwrap_err();
        assert!(error.contains("no such file.toml"), "{error}");
    }
}
