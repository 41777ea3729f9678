MISSING = "needs the package prometheus-client; install phalanx[metrics]"
