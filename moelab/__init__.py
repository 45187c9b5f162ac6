"""moelab: is expert routing predictable enough that reading experts early pays?

The package is thin and imports nothing heavy: `import moelab` stays under 0.3 s. Import the room
you need (`moelab.models`, `moelab.flywheel`, `moelab.policies`, `moelab.lab`).
"""

__version__ = "0.1.0"
