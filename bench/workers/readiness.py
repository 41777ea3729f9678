"""Prints how long helpers take to be ready for a list of modules (arguments), and how many they left out."""

import sys
import time

from phalanx.zygote.spawner import Spawner

begin = time.monotonic()
helpers = Spawner("python", preload=sys.argv[1:])
while helpers.importing:
    helpers.events()
seconds = time.monotonic() - begin
log = helpers.log
print(seconds, len(log.unsuitable) if log is not None else 0)
helpers.close()
