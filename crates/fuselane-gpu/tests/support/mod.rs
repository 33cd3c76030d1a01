//! What the tests share: the device that there is, in every way that it can be tuned.

#![allow(dead_code, reason = "each test takes what it needs of this")]

use fuselane_gpu::{Device, Tuning};

/// The device.
pub(crate) fn device() -> Device {
    Device::open().expect("a device")
}

const PLAIN: Tuning =
    Tuning { vector: None, planes: None, units: None, wide_indices: None, reread: None };

/// As the launch layer chooses, and every other way. lavapipe hides its planes, but has them.
pub(crate) const TUNINGS: [(&str, Tuning); 6] = [
    ("default", PLAIN),
    ("vector 1", Tuning { vector: Some(1), ..PLAIN }),
    ("planes", Tuning { planes: Some(true), ..PLAIN }),
    ("no planes", Tuning { planes: Some(false), ..PLAIN }),
    ("reread", Tuning { reread: Some(true), ..PLAIN }),
    ("32 units", Tuning { units: Some(32), ..PLAIN }),
];

/// The device, tuned in each way.
pub(crate) fn devices() -> impl Iterator<Item = (&'static str, Device)> {
    let device = device();
    TUNINGS.into_iter().map(move |(name, tuning)| (name, device.tuned(tuning)))
}
