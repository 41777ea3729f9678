/* Preloaded into an observed process: appends "PID NAME\n" for every variable that C code asks for to the file that
   PROOF_GETENV names. It walks `environ` itself, because a lookup of libc's getenv may call getenv. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

static char *find(const char *name)
{
    size_t length = strlen(name);
    for (char **one = environ; one && *one; one++)
        if (!strncmp(*one, name, length) && (*one)[length] == '=')
            return *one + length + 1;
    return 0;
}

char *getenv(const char *name)
{
    char line[300];
    const char *path = find("PROOF_GETENV");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
        int length = snprintf(line, sizeof line, "%d %.200s\n", (int)getpid(), name);
        if (write(fd, line, (size_t)length) < 0) {} /* nothing can be done here */
        close(fd);
    }
    return find(name);
}

char *secure_getenv(const char *name) { return getenv(name); }
