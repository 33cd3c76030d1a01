//! Normalization over the last dimension, with residual, gate, weight and bias fused in.

use super::act::Act;

/// How the weight enters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightForm {
    /// `* weight`
    #[default]
    Plain,
    /// `* (1 + weight)`, as Gemma does.
    OnePlus,
}

/// Where the gate multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum GatePosition {
    /// What is normalized.
    #[default]
    Pre,
    /// The normalized, weighted and biased result.
    Post,
}

/// Options of the normalization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalize {
    /// Subtracts the mean first.
    pub center: bool,
    /// Added to the mean square before the root; finite and not negative.
    pub eps: f64,
    /// Multiplies the normalized values.
    pub scale: f64,
    /// The last dimension is normalized in this many equal groups.
    pub groups: usize,
    /// How the weight, if there is one, enters.
    pub weight_form: WeightForm,
    /// Where the gate, if there is one, multiplies.
    pub gate_position: GatePosition,
    /// The activation of the gate.
    pub gate_act: Act,
}

impl Default for Normalize {
    fn default() -> Self {
        Self {
            center: false,
            eps: 1e-6,
            scale: 1.0,
            groups: 1,
            weight_form: WeightForm::Plain,
            gate_position: GatePosition::Pre,
            gate_act: Act::Sigmoid,
        }
    }
}
