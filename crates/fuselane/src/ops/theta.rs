//! Frequency schedules for `rotate` and `cosine`.
//!
//! The frequency of pair k of `dim` features is
//!
//! ```text
//! theta_k = base^(-2k / dim),   k in 0..dim / 2
//! ```
//!
//! A model that was trained on short sequences is carried to longer ones by lowering frequencies,
//! above all the low ones, whose waves were never seen whole. [`Scaling`] lists the usual ways; the
//! names and conventions are those of the `rope_scaling` entry in the configuration of published
//! checkpoints, as Hugging Face transformers reads them.

use std::f64::consts::PI;

use crate::error::{Error, Result};

/// A schedule of `dim / 2` frequencies.
///
/// ```
/// use fuselane::ops::theta::{Scaling, Theta};
///
/// let theta = Theta { dim: 4, ..Theta::default() };
/// assert_eq!(theta.frequencies_f32()?, [1.0, 0.01]);
///
/// let llama = Theta { dim: 128, base: 500_000.0, scaling: Scaling::llama3(8.0, 8192) };
/// let frequencies = llama.frequencies()?;
/// assert_eq!(frequencies.len(), 64);
/// assert_eq!(frequencies[0], 1.0);
/// # Ok::<(), fuselane::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Theta {
    /// The number of features that rotate; even and not 0.
    pub dim: usize,
    /// Called `rope_theta` in configurations; finite and greater than 0.
    pub base: f64,
    /// How the frequencies are lowered for longer sequences.
    pub scaling: Scaling,
}

impl Default for Theta {
    /// 128 features, base 10000, no scaling.
    fn default() -> Self {
        Self { dim: 128, base: 10_000.0, scaling: Scaling::None }
    }
}

/// How frequencies are lowered for sequences `factor` times as long as those of the training.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Scaling {
    /// They are not.
    #[default]
    None,
    /// All are divided by the factor (position interpolation):
    /// `theta_k / factor`.
    Linear {
        /// How much longer the sequences are; at least 1.
        factor: f64,
    },
    /// The base grows, so that the highest frequency stays and the lowest one is divided by the
    /// factor (NTK-aware): `base * factor^(dim / (dim - 2))`.
    Ntk {
        /// How much longer the sequences are; at least 1.
        factor: f64,
    },
    /// By the wavelength `2 pi / theta_k`, as Llama 3.1 does. With the number of waves in the
    /// original length, `waves = original_max_position * theta_k / (2 pi)`:
    ///
    /// ```text
    /// waves > high_freq_factor    theta_k
    /// waves < low_freq_factor     theta_k / factor
    /// between                     (1 - s) * theta_k / factor + s * theta_k,
    ///                             s = (waves - low_freq_factor) / (high_freq_factor - low_freq_factor)
    /// ```
    Llama3 {
        /// How much longer the sequences are; at least 1.
        factor: f64,
        /// Fewer waves than this are scaled; greater than 0.
        low_freq_factor: f64,
        /// More waves than this are kept; greater than `low_freq_factor`.
        high_freq_factor: f64,
        /// The length of the training sequences; not 0.
        original_max_position: usize,
    },
    /// By the number of waves too, with a ramp that is linear in k (YaRN):
    ///
    /// ```text
    /// pair(waves) = dim * ln(original_max_position / (2 pi * waves)) / (2 ln base)
    /// low  = max(floor(pair(beta_fast)), 0)
    /// high = min(ceil(pair(beta_slow)), dim - 1)        (+ 0.001 where it equals low)
    /// ramp = (k - low) / (high - low), cut to 0..1
    /// (1 - ramp) * theta_k + ramp * theta_k / factor
    /// ```
    ///
    /// Queries and keys are meant to be multiplied by [`Theta::attention_factor`] besides.
    Yarn {
        /// How much longer the sequences are; at least 1.
        factor: f64,
        /// The length of the training sequences; not 0.
        original_max_position: usize,
        /// At least this many waves are kept; greater than `beta_slow`. The paper has 32.
        beta_fast: f64,
        /// At most this many waves are scaled in full; greater than 0. The paper has 1.
        beta_slow: f64,
    },
}

impl Scaling {
    /// [`Scaling::Llama3`] with the limits of the published models, 1 and 4 waves.
    pub const fn llama3(factor: f64, original_max_position: usize) -> Self {
        Self::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position }
    }

    /// [`Scaling::Yarn`] with the limits of the paper, 32 and 1 waves.
    pub const fn yarn(factor: f64, original_max_position: usize) -> Self {
        Self::Yarn { factor, original_max_position, beta_fast: 32.0, beta_slow: 1.0 }
    }
}

impl Theta {
    /// The `dim / 2` frequencies, highest first, computed in f64.
    ///
    /// # Errors
    ///
    /// Where a field does not have the range its documentation gives.
    ///
    /// ```
    /// use fuselane::ops::theta::{Scaling, Theta};
    /// let theta = Theta { dim: 2, base: 100.0, scaling: Scaling::Linear { factor: 0.5 } };
    /// let error = theta.frequencies().unwrap_err();
    /// assert_eq!(error.to_string(), "theta: factor is 0.5, expected a finite number of at least 1");
    /// ```
    pub fn frequencies(&self) -> Result<Vec<f64>> {
        let Self { dim, base, scaling } = *self;
        self.check()?;
        let plain = |base: f64| (0..dim / 2).map(move |k| power(base, 2 * k, dim));
        Ok(match scaling {
            Scaling::None => plain(base).collect(),
            Scaling::Linear { factor } => plain(base).map(|theta| theta / factor).collect(),
            Scaling::Ntk { factor } => {
                plain(base * factor.powf(dim as f64 / (dim as f64 - 2.0))).collect()
            }
            Scaling::Llama3 {
                factor,
                original_max_position,
                low_freq_factor: low,
                high_freq_factor: high,
            } => {
                let waves = |theta: f64| original_max_position as f64 * theta / (2.0 * PI);
                let kept = |theta: f64| (waves(theta) - low) / (high - low);
                plain(base).map(|theta| blend(theta, factor, kept(theta))).collect()
            }
            Scaling::Yarn { factor, .. } => {
                let (low, high) = self.yarn_ramp()?;
                plain(base)
                    .enumerate()
                    .map(|(k, theta)| blend(theta, factor, 1.0 - (k as f64 - low) / (high - low)))
                    .collect()
            }
        })
    }

    /// [`frequencies`](Self::frequencies), each rounded once to f32.
    ///
    /// # Errors
    ///
    /// As [`frequencies`](Self::frequencies).
    pub fn frequencies_f32(&self) -> Result<Vec<f32>> {
        Ok(self.frequencies()?.into_iter().map(|theta| theta as f32).collect())
    }

    /// What queries and keys are to be multiplied by: `0.1 ln(factor) + 1` for YaRN, otherwise 1.
    ///
    /// ```
    /// use fuselane::ops::theta::{Scaling, Theta};
    /// let theta = Theta { scaling: Scaling::yarn(4.0, 32_768), ..Theta::default() };
    /// assert!((theta.attention_factor() - 1.138_629_436).abs() < 1e-9);
    /// ```
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            Scaling::Yarn { factor, .. } => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    /// The pairs between which the YaRN ramp rises from 0 to 1.
    fn yarn_ramp(&self) -> Result<(f64, f64)> {
        let Self { dim, base, scaling } = *self;
        let Scaling::Yarn { original_max_position, beta_fast, beta_slow, .. } = scaling else {
            unreachable!("only YaRN has a ramp over pairs")
        };
        let pair = |waves: f64| {
            let length = original_max_position as f64 / (2.0 * PI * waves);
            dim as f64 * length.ln() / (2.0 * base.ln())
        };
        let low = pair(beta_fast).floor().max(0.0);
        let high = pair(beta_slow).ceil().min(dim as f64 - 1.0);
        // Else the ramp would lie outside the pairs and run backwards.
        require(
            low <= high,
            "original_max_position",
            original_max_position,
            "a length in which some pairs have more than beta_slow and some fewer than beta_fast waves",
        )?;
        Ok((low, if low == high { high + 0.001 } else { high }))
    }

    fn check(&self) -> Result<()> {
        let even = self.dim > 0 && self.dim.is_multiple_of(2) && self.dim / 2 <= MOST;
        require(even, "dim", self.dim, "an even number from 2 to 2^31")?;
        check_base(self.base)?;
        let (factor, length) = match self.scaling {
            Scaling::None => return Ok(()),
            Scaling::Linear { factor } | Scaling::Ntk { factor } => return check_factor(factor),
            Scaling::Llama3 { factor, original_max_position, .. }
            | Scaling::Yarn { factor, original_max_position, .. } => {
                (factor, original_max_position)
            }
        };
        check_factor(factor)?;
        if let Scaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. } = self.scaling {
            check_greater("low_freq_factor", low, 0.0, "0")?;
            check_greater("high_freq_factor", high, low, "low_freq_factor")?;
        }
        if let Scaling::Yarn { beta_fast, beta_slow, .. } = self.scaling {
            check_greater("beta_slow", beta_slow, 0.0, "0")?;
            check_greater("beta_fast", beta_fast, beta_slow, "beta_slow")?;
            check_greater("base", self.base, 1.0, "1 (for YaRN)")?;
        }
        require(length > 0, "original_max_position", length, "a length greater than 0")
    }
}

/// `base^(-k / count)` for k in 0..count: the schedule for any number of frequencies, such as the
/// ceil(d / axes) of a cosine encoding on a grid.
///
/// # Errors
///
/// Where `base` is not finite and greater than 0.
///
/// ```
/// use fuselane::ops::theta::schedule;
/// assert_eq!(schedule(2, 10_000.0)?, [1.0, 0.01]);
/// // A cosine encoding of 64 features on a grid of 3 axes.
/// assert_eq!(schedule(64usize.div_ceil(3), 10_000.0)?.len(), 22);
/// # Ok::<(), fuselane::Error>(())
/// ```
pub fn schedule(count: usize, base: f64) -> Result<Vec<f64>> {
    check_base(base)?;
    require(count <= MOST, "count", count, "at most 2^30")?;
    Ok((0..count).map(|k| power(base, k, count)).collect())
}

/// The most frequencies: more than any model has, and few enough for memory.
const MOST: usize = 1 << 30;

/// base^(-numerator / denominator), written as a quotient so that round powers come out round.
fn power(base: f64, numerator: usize, denominator: usize) -> f64 {
    1.0 / base.powf(numerator as f64 / denominator as f64)
}

/// From `theta / factor`, where `kept` is 0 or less, to `theta`, where it is 1 or more.
fn blend(theta: f64, factor: f64, kept: f64) -> f64 {
    let kept = kept.clamp(0.0, 1.0);
    (1.0 - kept) * theta / factor + kept * theta
}

fn require(
    holds: bool,
    argument: &'static str,
    value: impl std::fmt::Display,
    expected: impl Into<String>,
) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::new("theta", argument, format!("is {value}"), expected)) }
}

fn check_base(base: f64) -> Result<()> {
    check_greater("base", base, 0.0, "0")
}

fn check_factor(factor: f64) -> Result<()> {
    let holds = factor.is_finite() && factor >= 1.0;
    require(holds, "factor", factor, "a finite number of at least 1")
}

fn check_greater(argument: &'static str, value: f64, limit: f64, limit_name: &str) -> Result<()> {
    let expected = format!("a finite number greater than {limit_name}");
    require(value.is_finite() && value > limit, argument, value, expected)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len());
        for (k, (got, expected)) in got.iter().zip(expected).enumerate() {
            assert!((got / expected - 1.0).abs() < 1e-12, "[{k}] is {got}, expected {expected}");
        }
    }

    fn frequencies(dim: usize, base: f64, scaling: Scaling) -> Vec<f64> {
        Theta { dim, base, scaling }.frequencies().unwrap()
    }

    #[test]
    fn without_scaling() {
        assert_close(&frequencies(8, 1e4, Scaling::None), &[1.0, 0.1, 0.01, 0.001]);
        assert_close(&frequencies(4, 1e6, Scaling::None), &[1.0, 1e-3]);
        assert_close(&frequencies(2, 7.0, Scaling::None), &[1.0]);
        assert_eq!(frequencies(128, 1e4, Scaling::None), schedule(64, 1e4).unwrap());
        assert_eq!(Theta::default().frequencies().unwrap().len(), 64);
        let rounded = Theta { dim: 8, ..Theta::default() }.frequencies_f32().unwrap();
        assert_eq!(rounded, [1.0, 0.1, 0.01, 0.001]);
        assert_eq!(schedule(0, 1e4).unwrap(), []);
        assert_close(&schedule(3, 8.0).unwrap(), &[1.0, 0.5, 0.25]);
    }

    #[test]
    fn linear_and_ntk() {
        let linear = frequencies(8, 1e4, Scaling::Linear { factor: 4.0 });
        assert_close(&linear, &[0.25, 0.025, 0.0025, 0.00025]);
        // The base becomes 1e4 * 8^(8/6) = 16e4, whose fourth root is 20: the highest stays, the
        // lowest is divided by the factor.
        let ntk = frequencies(8, 1e4, Scaling::Ntk { factor: 8.0 });
        assert_close(&ntk, &[1.0, 1.0 / 20.0, 1.0 / 400.0, 1.0 / 8000.0]);
        assert_close(&frequencies(2, 1e4, Scaling::Ntk { factor: 8.0 }), &[1.0]);
    }

    #[test]
    fn llama3() {
        // 2000 pi positions: theta_k has 1000 theta_k waves, here 1000, 100, 10, 1. Between 1.5
        // and 21.5 waves, 10 waves keep 8.5 / 20 of the frequency and scale the rest.
        let original = (2000.0 * PI) as usize;
        let scaling = Scaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.5,
            high_freq_factor: 21.5,
            original_max_position: original,
        };
        let waves = original as f64 * 0.01 / (2.0 * PI);
        let kept = (waves - 1.5) / 20.0;
        assert!((kept - 8.5 / 20.0).abs() < 1e-3);
        let between = 0.01 * ((1.0 - kept) / 8.0 + kept);
        assert_close(&frequencies(8, 1e4, scaling), &[1.0, 0.1, between, 0.001 / 8.0]);
    }

    #[test]
    fn yarn() {
        // 640 pi positions hold 320 theta_k waves: 320, 32, 3.2 and 0.32 for dim 8. Pair 1 has just
        // 32 waves, so that low is 0 or 1 by rounding; 2000 positions make it 0. One wave lies
        // between pairs 2 and 3: high is 3. The ramp is k / 3.
        let scaling = Scaling::yarn(4.0, 2000);
        let expected = [1.0, 0.1, 0.01, 0.001];
        let expected: Vec<f64> = (0..4)
            .map(|k| {
                let ramp = k as f64 / 3.0;
                expected[k] * (1.0 - ramp) + expected[k] / 4.0 * ramp
            })
            .collect();
        assert_close(&expected, &[1.0, 0.075, 0.005, 0.00025]);
        assert_close(&frequencies(8, 1e4, scaling), &expected);
        // A head of 128 features, base 1e4 and 4096 positions: YaRN's limits for Llama 2 are the
        // pairs 20 and 46.
        let theta = Theta { dim: 128, base: 1e4, scaling: Scaling::yarn(16.0, 4096) };
        assert_eq!(theta.yarn_ramp().unwrap(), (20.0, 46.0));
        let (scaled, plain) = (theta.frequencies().unwrap(), frequencies(128, 1e4, Scaling::None));
        assert_eq!(scaled[..=20], plain[..=20]);
        assert!(scaled[21] < plain[21] && scaled[45] > plain[45] / 16.0);
        let sixteenth: Vec<f64> = plain.iter().map(|theta| theta / 16.0).collect();
        assert_eq!(scaled[46..], sixteenth[46..]);
    }

    #[test]
    fn published_configurations() {
        // By the formulas of transformers' modeling_rope_utils, in Python's f64: Llama 3.1 8B, and
        // Qwen 2.5 with its YaRN entry.
        let pick = |theta: &[f64], pairs: &[usize]| -> Vec<f64> {
            pairs.iter().map(|&k| theta[k]).collect()
        };
        let llama = frequencies(128, 500_000.0, Scaling::llama3(8.0, 8192));
        let expected = [
            1.0,
            0.016560440080994446,
            0.003211445994752591,
            0.002166570763503359,
            0.0013718935677611381,
            0.0001785078127679964,
            9.556212353964683e-05,
            7.78465527393245e-05,
            3.068925988914511e-07,
        ];
        assert_close(&pick(&llama, &[0, 20, 28, 29, 30, 34, 35, 36, 63]), &expected);
        let qwen = frequencies(128, 1e6, Scaling::yarn(4.0, 32_768));
        let expected = [
            1.0,
            0.01333521432163324,
            0.005375321490790102,
            0.001064360981247002,
            6.490394320837029e-05,
            4.445698525097307e-05,
            3.582531425592407e-05,
            3.102344401879299e-07,
        ];
        assert_close(&pick(&qwen, &[0, 20, 24, 30, 39, 40, 41, 63]), &expected);
    }

    #[test]
    fn a_factor_of_one_changes_nothing() {
        let plain = frequencies(64, 1e4, Scaling::None);
        for scaling in [
            Scaling::Linear { factor: 1.0 },
            Scaling::Ntk { factor: 1.0 },
            Scaling::llama3(1.0, 8192),
            Scaling::yarn(1.0, 4096),
        ] {
            assert_close(&frequencies(64, 1e4, scaling), &plain);
            let theta = Theta { scaling, ..Theta::default() };
            assert_eq!(theta.attention_factor(), 1.0);
        }
        assert_eq!(Theta::default().attention_factor(), 1.0);
    }

    #[test]
    fn wrong_fields_are_named() {
        let llama3 = |low_freq_factor, high_freq_factor, original_max_position| Scaling::Llama3 {
            factor: 2.0,
            low_freq_factor,
            high_freq_factor,
            original_max_position,
        };
        let yarn = |beta_fast, beta_slow, original_max_position| Scaling::Yarn {
            factor: 2.0,
            original_max_position,
            beta_fast,
            beta_slow,
        };
        let nan = f64::NAN;
        for (dim, base, scaling, argument) in [
            (0, 1e4, Scaling::None, "dim"),
            (7, 1e4, Scaling::None, "dim"),
            (8, 0.0, Scaling::None, "base"),
            (8, -1.0, Scaling::None, "base"),
            (8, nan, Scaling::None, "base"),
            (8, f64::INFINITY, Scaling::None, "base"),
            (8, 1e4, Scaling::Linear { factor: 0.9 }, "factor"),
            (8, 1e4, Scaling::Linear { factor: nan }, "factor"),
            (8, 1e4, Scaling::Ntk { factor: f64::INFINITY }, "factor"),
            (8, 1e4, Scaling::llama3(0.0, 8192), "factor"),
            (8, 1e4, Scaling::yarn(-1.0, 8192), "factor"),
            (8, 1e4, llama3(0.0, 4.0, 8192), "low_freq_factor"),
            (8, 1e4, llama3(4.0, 4.0, 8192), "high_freq_factor"),
            (8, 1e4, llama3(1.0, nan, 8192), "high_freq_factor"),
            (8, 1e4, llama3(1.0, 4.0, 0), "original_max_position"),
            (8, 1e4, yarn(32.0, 0.0, 8192), "beta_slow"),
            (8, 1e4, yarn(1.0, 1.0, 8192), "beta_fast"),
            (8, 1e4, yarn(32.0, 1.0, 0), "original_max_position"),
            (64, 1e4, yarn(32.0, 1.0, 3), "original_max_position"),
            (8, 1e4, yarn(32.0, 1.0, 1 << 40), "original_max_position"),
            (8, 1.0, yarn(32.0, 1.0, 8192), "base"),
        ] {
            let error = Theta { dim, base, scaling }.frequencies().unwrap_err();
            assert_eq!((error.operator(), error.argument()), ("theta", argument), "{error}");
        }
        assert_eq!(schedule(4, nan).unwrap_err().argument(), "base");
    }
}
